"""Where the trainer's features come from. One source so far, the store; a live one will give the
same batches.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.core import RowPlan
from draftsmith.store.shards import StoreReader
from draftsmith.target.rows import plan_rows


@dataclass(frozen=True)
class FeatureBatch:
    """Samples of like length, right-padded to S: hidden [b, S, taps, H], input_ids [b, S],
    loss_mask [b, S] (0 on padding).
    """

    sample_ids: list[int]
    hidden: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    num_tokens: int

    def to(self, device: torch.device, dtype: torch.dtype) -> "FeatureBatch":
        """On the device; states in `dtype`."""
        return FeatureBatch(
            self.sample_ids,
            self.hidden.to(device, dtype, non_blocking=True),
            self.input_ids.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.num_tokens,
        )


class StoreSource:
    """Batches of a split's samples from a store. The order is a pure function of lengths, seed and
    epoch.
    """

    def __init__(self, folder: Path, sample_ids: list[int]) -> None:
        self._reader = StoreReader(folder)
        self.sample_ids = sample_ids
        self.lengths = [self._reader.length(i) for i in sample_ids]

    def plan(self, *, tokens_per_batch: int, seed: int, epoch: int) -> RowPlan:
        """The micro-batches of an epoch; rows hold positions into `sample_ids`."""
        return plan_rows(
            self.lengths, tokens_per_batch=tokens_per_batch, seed=seed * 1_000_003 + epoch
        )

    def batch(self, row: list[int]) -> FeatureBatch:
        """Read one micro-batch."""
        read = [self._reader.read(self.sample_ids[i]) for i in row]
        return FeatureBatch(
            [self.sample_ids[i] for i in row],
            pad_sequence([r["hidden"] for r in read], batch_first=True),
            pad_sequence([r["input_ids"].long() for r in read], batch_first=True),
            pad_sequence([r["loss_mask"] for r in read], batch_first=True),
            sum(self.lengths[i] for i in row),
        )
