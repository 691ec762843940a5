"""Where the trainer's features come from. One source so far, the store; a live one will give the
same batches.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.core import RowPlan
from draftsmith.places import Place
from draftsmith.store.reader import StoreReader
from draftsmith.target.rows import plan_rows

AHEAD, THREADS = 4, 2
"""Micro-batches read ahead of the trainer, and the threads that read and unpack them."""


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

    def pinned(self) -> "FeatureBatch":
        """In page-locked memory, from which a GPU copies without waiting."""
        return FeatureBatch(
            self.sample_ids,
            self.hidden.pin_memory(),
            self.input_ids.pin_memory(),
            self.loss_mask.pin_memory(),
            self.num_tokens,
        )


class StoreSource:
    """Batches of a split's samples from a store. The order is a pure function of lengths, seed and
    epoch.
    """

    def __init__(self, location: Path | str | Place | StoreReader, sample_ids: list[int]) -> None:
        self._reader = location if isinstance(location, StoreReader) else StoreReader(location)
        self.sample_ids = sample_ids
        self.lengths = [self._reader.length(i) for i in sample_ids]

    def plan(self, *, tokens_per_batch: int, seed: int, epoch: int) -> RowPlan:
        """The micro-batches of an epoch; rows hold positions into `sample_ids`."""
        return plan_rows(
            self.lengths, tokens_per_batch=tokens_per_batch, seed=seed * 1_000_003 + epoch
        )

    def batch(self, row: list[int]) -> FeatureBatch:
        """Read one micro-batch, the states straight into their padded places."""
        reader, ids = self._reader, [self.sample_ids[i] for i in row]
        lengths = [self.lengths[i] for i in row]
        size = (len(row), max(lengths))
        hidden = torch.empty(*size, *reader.states_shape, dtype=reader.dtype)
        tokens = torch.zeros(size, dtype=torch.long)
        mask = torch.zeros(size, dtype=torch.uint8)
        for k, (sample_id, length) in enumerate(zip(ids, lengths, strict=True)):
            reader.states_into(sample_id, hidden[k, :length])
            hidden[k, length:] = 0
            small = reader.read(sample_id, ("input_ids", "loss_mask"))
            tokens[k, :length], mask[k, :length] = small["input_ids"], small["loss_mask"]
        return FeatureBatch(ids, hidden, tokens, mask, sum(lengths))

    def batches(self, rows: list[list[int]], *, pinned: bool) -> Iterator[FeatureBatch]:
        """These micro-batches in order, read ahead in threads; `pinned` for copies to a GPU."""
        with ThreadPoolExecutor(THREADS, "feature-reader") as readers:
            waiting: deque[Future[FeatureBatch]] = deque()
            coming = iter(rows)
            try:
                for row in coming:
                    waiting.append(readers.submit(self._ready, row, pinned))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for job in waiting:
                    job.cancel()

    def _ready(self, row: list[int], pinned: bool) -> FeatureBatch:
        batch = self.batch(row)
        return batch.pinned() if pinned else batch
