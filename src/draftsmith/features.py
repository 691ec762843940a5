"""Where the trainer's features come from, as rows of whole samples: a store, extracted once and read in
every epoch, or live (live.py): the target runs beside the trainer and nothing need be written. Same
rows, same batches, so the same losses.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.core import RowPlan
from draftsmith.places import Place
from draftsmith.store.buffers import Buffers
from draftsmith.store.reader import StoreReader
from draftsmith.target.rows import plan_mixed_rows, plan_packed_rows

EXTRA: dict[str, tuple[str, ...]] = {"none": (), "state": ("final",), "argmax": ("argmax",)}
"""What `features.final` adds to a sample's tensors."""
AHEAD, THREADS = 4, 2
"""Micro-batches read ahead of the trainer, and the threads that read and unpack them."""


@dataclass(frozen=True)
class FeatureBatch:
    """A micro-batch, its samples end to end: hidden [N, taps, H], input_ids [N], loss_mask [N]; in
    `extra` final [N, H] or argmax [N] where they are kept. Ids, mask and argmax stay on the CPU, where
    blocks are made of them. `copied`: what must have happened before hidden's memory is filled again.
    """

    sample_ids: list[int]
    lengths: list[int]
    hidden: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)
    copied: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return len(self.input_ids)

    def to(self, device: torch.device, dtype: torch.dtype) -> "FeatureBatch":
        """States on the device, in `dtype`, which they get there: in one step torch would widen them
        before the copy, and wait.
        """
        hidden, extra = self.hidden.to(device, non_blocking=True), dict(self.extra)
        if "final" in extra:
            extra["final"] = extra["final"].to(device, non_blocking=True)
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
            self.copied.append(copied)
        if "final" in extra:
            extra["final"] = extra["final"].to(dtype)
        rest = (self.input_ids, self.loss_mask, extra)
        return FeatureBatch(self.sample_ids, self.lengths, hidden.to(dtype), *rest)


class Source(Protocol):
    """Features of a split's samples, by position."""

    sample_ids: list[int]
    lengths: list[int]

    def fit(self, rows: list[list[int]]) -> bool:
        """Whether these micro-batches are read together."""
        ...

    def batches(
        self, rows: list[list[int]], *, pinned: bool, turns: Iterable[int] | None = None
    ) -> Iterator[FeatureBatch | None]:
        """These micro-batches in order, None for an empty one; `pinned`: from page-locked memory, for copies
        to a GPU; `turns`: how many of them are read together, where that matters.
        """
        ...

    def end_epoch(self) -> None:
        """Every sample was asked for once more."""
        ...


def epoch_plan(
    sizes: list[int], *, budget: int, seed: int, epoch: int, mixed: bool = False
) -> RowPlan:
    """The micro-batches of an epoch, samples of these sizes up to `budget` in each; rows hold positions.
    `mixed`: each is a mixture of lengths like the whole, and less full. A pure function of its arguments.
    """
    plan = plan_mixed_rows if mixed else plan_packed_rows
    return plan(sizes, tokens_per_batch=budget, seed=seed * 1_000_003 + epoch)


class StoreSource:
    """Batches of a split's samples from a store."""

    def __init__(self, location: Path | str | Place | StoreReader, sample_ids: list[int]) -> None:
        self.reader = location if isinstance(location, StoreReader) else StoreReader(location)
        self.sample_ids = sample_ids
        self.lengths = [self.reader.length(i) for i in sample_ids]
        final = self.reader.manifest["inputs"].get("final", "none")
        self._extra = EXTRA[final]

    def batch(self, row: list[int], buffers: Buffers | None = None) -> FeatureBatch:
        """Read one micro-batch, the states straight into their places."""
        reader, ids = self.reader, [self.sample_ids[i] for i in row]
        lengths = [self.lengths[i] for i in row]
        buffers = buffers or Buffers(self._num_bytes(row), keep=0, pinned=False)
        hidden, copied = buffers.take((sum(lengths), *reader.states_shape), reader.dtype)
        parts: dict[str, list[Tensor]] = {
            name: [] for name in ("input_ids", "loss_mask", *self._extra)
        }
        for sample_id, states in zip(ids, hidden.split(lengths), strict=True):
            reader.states_into(sample_id, states)
            for name, tensor in reader.read(sample_id, tuple(parts)).items():
                parts[name].append(tensor)
        whole = {name: torch.cat(tensors) for name, tensors in parts.items()}
        tokens, mask = whole.pop("input_ids").long(), whole.pop("loss_mask")
        if buffers.pinned:
            whole = {name: tensor.pin_memory() for name, tensor in whole.items()}
        return FeatureBatch(ids, lengths, hidden, tokens, mask, whole, copied)

    def _batch(self, row: list[int], buffers: Buffers) -> FeatureBatch | None:
        return self.batch(row, buffers) if row else None

    def _num_bytes(self, row: list[int]) -> int:
        taps, width = self.reader.states_shape
        return sum(self.lengths[i] for i in row) * taps * width * self.reader.dtype.itemsize

    def fit(self, rows: list[list[int]]) -> bool:
        """One at a time."""
        return False

    def batches(
        self, rows: list[list[int]], *, pinned: bool, turns: Iterable[int] | None = None
    ) -> Iterator[FeatureBatch | None]:
        """These micro-batches in order, read ahead in threads."""
        size = max(map(self._num_bytes, rows), default=0)
        buffers = Buffers(size, keep=AHEAD + THREADS, pinned=pinned)
        with ThreadPoolExecutor(THREADS, "feature-reader") as readers:
            waiting: deque[Future[FeatureBatch | None]] = deque()
            try:
                for row in rows:
                    waiting.append(readers.submit(self._batch, row, buffers))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for job in waiting:
                    job.cancel()

    def end_epoch(self) -> None:
        """Nothing changes."""
