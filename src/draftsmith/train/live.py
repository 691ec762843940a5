"""The live source: the target's forward in the trainer's process, on the trainer's GPU. Nothing need be
written; with a budget the first epoch fills a store, and later epochs read what fitted.

Micro-batches that follow each other share rows of the target, so that it runs at its own best size.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from draftsmith.core import Sample
from draftsmith.features import EXTRA, FeatureBatch
from draftsmith.store.reader import StoreReader
from draftsmith.store.writer import WriteThrough
from draftsmith.target.forward import StatesForward, check_peaks
from draftsmith.target.rows import TURN_ROWS, joined_rows, plan_rows
from draftsmith.train.schedule import turns as own_turns

States = dict[str, Tensor]
"""hidden [n, taps, H] of a sample, and final [n, H] or argmax [n] when asked for."""


class LiveSource:
    """Batches of these samples. `row_tokens`: of one forward of the target. `keep`: a store that fills
    during the first epoch. `stored`: finished stores, from which samples are read in place of computed;
    `all_stored`: those of all ranks, once each has finished its own.
    """

    def __init__(
        self,
        forward: StatesForward,
        samples: Sequence[Sample],
        *,
        row_tokens: int,
        keep: WriteThrough | None = None,
        stored: Sequence[StoreReader] = (),
        all_stored: Callable[[], list[StoreReader]] | None = None,
    ) -> None:
        self._all_stored = all_stored
        self._forward, self._samples, self._row_tokens = forward, samples, row_tokens
        self.sample_ids = [sample.sample_id for sample in samples]
        self.lengths = [len(sample.input_ids) for sample in samples]
        self._keep, self._rows = keep, 0
        self._peaks: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []
        self.read_from(stored)

    def read_from(self, stored: Sequence[StoreReader]) -> None:
        """From now on, these stores' samples are read."""
        self._reader_of = {
            sample_id: reader for reader in stored for sample_id in reader.sample_ids
        }

    def fit(self, rows: list[list[int]]) -> bool:
        """Whether few rows of the target hold them."""
        tokens = sum(self.lengths[i] for row in rows for i in row)
        return tokens <= TURN_ROWS * self._row_tokens and len(self._planned(rows)) <= TURN_ROWS

    def _planned(self, rows: list[list[int]]) -> list[list[int]]:
        """The target's rows for these micro-batches."""
        budget = self._row_tokens
        if self._forward.row_tokens is not None:
            return joined_rows(rows, self.lengths, tokens_per_batch=budget)
        flat = [i for row in rows for i in row]  # right-padded: samples of like length together
        lengths = [self.lengths[i] for i in flat]
        plan = plan_rows(lengths, tokens_per_batch=budget, seed=0)
        return [[flat[k] for k in row] for row in plan.rows]

    def batches(
        self, rows: list[list[int]], *, pinned: bool, turns: Iterable[int] | None = None
    ) -> Iterator[FeatureBatch | None]:
        """These micro-batches in order, states on the target's device."""
        if turns is None:
            turns = own_turns(([row] for row in rows), self.fit)
        left = iter(rows)
        for count in turns:
            group = list(itertools.islice(left, count))
            states = self._states(group)
            for row in group:
                yield self._batch(row, states) if row else None
            states.clear()  # before the next turn's are there
        self._check(ahead=0)

    def _states(self, rows: list[list[int]]) -> dict[int, States]:
        """By position: read where a store has them, the rest computed, kept while there is room."""
        stored = [i for row in rows for i in row if self.sample_ids[i] in self._reader_of]
        out = {i: self._read(i) for i in stored}
        for row in self._planned([[i for i in row if i not in out] for row in rows]):
            out |= self._computed(row)
        return out

    def _read(self, position: int) -> States:
        sample_id = self.sample_ids[position]
        names = EXTRA[self._forward.final]
        tensors = self._reader_of[sample_id].read(sample_id, ("hidden", *names))
        device = self._forward.model.device
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def _computed(self, positions: list[int]) -> dict[int, States]:
        row = [self._samples[i] for i in positions]
        made = self._forward.on_device(row)
        if self._keep is not None and not self._keep.full:
            for features in self._forward.to_host(made).features():
                self._keep.add(features)
        peaks = torch.stack([made.parts["peaks"][a:b].amax(0) for a, b in made.spans])
        self._peaks.append(self._on_the_way([s.sample_id for s in row], peaks))
        self._check(ahead=min(self._rows, 1))
        self._rows += 1
        return {
            i: {name: part[a:b] for name, part in made.parts.items() if name != "peaks"}
            for i, (a, b) in zip(positions, made.spans, strict=True)
        }

    def _on_the_way(
        self, sample_ids: list[int], peaks: Tensor
    ) -> tuple[list[int], Tensor, torch.cuda.Event | None]:
        if peaks.device.type != "cuda":
            return sample_ids, peaks, None
        host = torch.empty(peaks.shape, dtype=peaks.dtype, pin_memory=True)
        host.copy_(peaks, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return sample_ids, host, arrived

    def _check(self, *, ahead: int) -> None:
        """Look at the states of all rows but the last `ahead`, which a GPU may still compute. Raises
        UserError for states that cannot be.
        """
        while len(self._peaks) > ahead:
            sample_ids, peaks, arrived = self._peaks.pop(0)
            if arrived is not None:
                arrived.synchronize()
            for sample_id, of_taps in zip(sample_ids, peaks, strict=True):
                check_peaks(sample_id, self._forward.taps, of_taps[None])

    def _batch(self, row: list[int], states: dict[int, States]) -> FeatureBatch:
        samples = [self._samples[i] for i in row]
        parts = {
            name: torch.cat([states[i][name] for i in row])  # no longer inference tensors
            for name in states[row[0]]
        }
        return FeatureBatch(
            [s.sample_id for s in samples],
            [self.lengths[i] for i in row],
            parts.pop("hidden"),
            torch.tensor([token for s in samples for token in s.input_ids]),
            torch.tensor([m for s in samples for m in s.loss_mask], dtype=torch.uint8),
            parts,
        )

    def end_epoch(self) -> None:
        """The stores that filled are finished, this rank's and the others', and read from now on: in the next
        epoch it gets other samples. Every rank gets here.
        """
        if self._keep is not None:
            self._keep.finish({})
            self._keep = None
        if self._all_stored is not None:
            self.read_from(self._all_stored())
            self._all_stored = None
