"""Where the trainer's features come from. One source so far, the store; a live one will give the
same batches.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.core import RowPlan
from draftsmith.places import Place
from draftsmith.store.buffers import Buffers
from draftsmith.store.reader import StoreReader
from draftsmith.target.rows import plan_rows

AHEAD, THREADS = 4, 2
"""Micro-batches read ahead of the trainer, and the threads that read and unpack them."""


@dataclass(frozen=True)
class FeatureBatch:
    """Samples of like length, right-padded to S: hidden [b, S, taps, H], input_ids [b, S],
    loss_mask [b, S] (0 on padding). `copied`: what must have happened before hidden's memory is
    filled again.
    """

    sample_ids: list[int]
    hidden: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    num_tokens: int
    copied: list[Any] = field(default_factory=list, repr=False, compare=False)

    def to(self, device: torch.device, dtype: torch.dtype) -> "FeatureBatch":
        """On the device; states in `dtype`, which they get there: in one step torch would widen them
        before the copy, and wait.
        """
        hidden = self.hidden.to(device, non_blocking=True)
        ids = self.input_ids.to(device, non_blocking=True)
        mask = self.loss_mask.to(device, non_blocking=True)
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
            self.copied.append(copied)
        return FeatureBatch(self.sample_ids, hidden.to(dtype), ids, mask, self.num_tokens)


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

    def batch(self, row: list[int], buffers: Buffers | None = None) -> FeatureBatch:
        """Read one micro-batch, the states straight into their padded places."""
        reader, ids = self._reader, [self.sample_ids[i] for i in row]
        lengths = [self.lengths[i] for i in row]
        size = (len(row), max(lengths))
        buffers = buffers or Buffers(self._num_bytes(row), keep=0, pinned=False)
        hidden, copied = buffers.take((*size, *reader.states_shape), reader.dtype)
        tokens = torch.zeros(size, dtype=torch.long, pin_memory=buffers.pinned)
        mask = torch.zeros(size, dtype=torch.uint8, pin_memory=buffers.pinned)
        for k, (sample_id, length) in enumerate(zip(ids, lengths, strict=True)):
            reader.states_into(sample_id, hidden[k, :length])
            hidden[k, length:] = 0
            small = reader.read(sample_id, ("input_ids", "loss_mask"))
            tokens[k, :length], mask[k, :length] = small["input_ids"], small["loss_mask"]
        return FeatureBatch(ids, hidden, tokens, mask, sum(lengths), copied)

    def _num_bytes(self, row: list[int]) -> int:
        taps, width = self._reader.states_shape
        longest = max(self.lengths[i] for i in row)
        return len(row) * longest * taps * width * self._reader.dtype.itemsize

    def batches(
        self,
        rows: list[list[int]],
        *,
        pinned: bool,
        begin: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Iterator[FeatureBatch]:
        """The micro-batches of these rows from position `begin` on, every `num_ranks`-th of them, in
        order and read ahead in threads; `pinned` for copies to a GPU. Positions count the rows of all
        ranks, so a run goes on exactly on another number of them.
        """
        mine = rows[begin + rank :: num_ranks]
        size = max(map(self._num_bytes, mine), default=0)
        buffers = Buffers(size, keep=AHEAD + THREADS, pinned=pinned)
        with ThreadPoolExecutor(THREADS, "feature-reader") as readers:
            waiting: deque[Future[FeatureBatch]] = deque()
            try:
                for row in mine:
                    waiting.append(readers.submit(self.batch, row, buffers))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for job in waiting:
                    job.cancel()
