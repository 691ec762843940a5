"""Which rank reads what, and when a live target runs: the same moment on every rank."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core import Sample
from draftsmith.features import FeatureBatch, epoch_plan
from draftsmith.ranks import Ranks
from draftsmith.target.rows import joined_rows
from draftsmith.train.live import LiveSource
from draftsmith.train.microbatch import Forward
from draftsmith.train.schedule import Step, deal, turns

BUDGET = 64
SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def planned(lengths: list[int], rows_a_step: int, epoch: int = 0) -> list[Step]:
    rows = epoch_plan(lengths, budget=BUDGET, seed=3, epoch=epoch).rows
    cut = range(0, len(rows), rows_a_step)
    return [Step(epoch, rows[a : a + rows_a_step]) for a in cut]


@given(lengths=SIZES, rows_a_step=st.integers(1, 9), count=st.integers(1, 5))
def test_every_rank_gets_a_like_share_of_every_step(lengths, rows_a_step, count):
    steps, had = planned(lengths, rows_a_step), np.zeros(count)
    for step, rounds in zip(steps, deal(steps, lengths, count), strict=True):
        assert len(rounds) == -(-len(step.rows) // count), "as many rounds for all"
        given_out = [row for each in rounds for row in each if row]
        assert sorted(given_out) == sorted(step.rows), "each once"
        assert all(all(each) for each in rounds[:-1]), "only a step's last round is short"
        had += [sum(lengths[i] for each in rounds for i in each[rank]) for rank in range(count)]
    if rows_a_step % count == 0 or count == 1:
        return
    assert had.max() - had.min() <= 3 * 100, "nobody is always the one that has more"


@given(lengths=SIZES, rows_a_step=st.integers(1, 9), count=st.integers(1, 5))
def test_a_turn_is_as_long_as_it_fits_on_every_rank(lengths, rows_a_step, count):
    rounds = [each for of in deal(planned(lengths, rows_a_step), lengths, count) for each in of]
    fit = source_of(lengths).fit
    first = 0
    for size in turns(rounds, fit):
        turn = rounds[first : first + size]
        assert size == 1 or all(map(fit, zip(*turn, strict=True)))
        longer = [*turn, *rounds[first + size : first + size + 1]]
        assert len(longer) == size or not all(map(fit, zip(*longer, strict=True)))
        first += size
    assert first == len(rounds)


@given(groups=st.lists(st.lists(st.integers(1, 100), max_size=6), max_size=9))
def test_micro_batches_join_in_rows_that_hold_them(groups):
    lengths = [n for group in groups for n in group]
    left = iter(range(len(lengths)))
    positions = [[next(left) for _ in group] for group in groups]
    rows = joined_rows(positions, lengths, tokens_per_batch=BUDGET)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= BUDGET for row in rows)
    if all(sum(group) <= BUDGET / 2 for group in groups):
        assert len(rows) <= -(-len(list(filter(None, groups))) // 2), "two halves make a row"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_live_target_runs_at_the_same_round_on_every_rank(count, monkeypatch):
    """Else each waits for the other's, every step."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 60, 300).tolist()
    steps = planned(lengths, 5) + planned(lengths, 5, epoch=1)
    dealt, ran, read = list(deal(steps, lengths, count)), [], []
    monkeypatch.setattr(LiveSource, "_batch", lambda self, row, states: batch_of(row))
    for rank in range(count):
        source = source_of(lengths)
        passed, begun = [0], []
        monkeypatch.setattr(source, "_states", lambda _, p=passed, b=begun: b.append(p[0]) or {})
        self = SimpleNamespace(_flex=False, device=torch.device("cpu"), _dtype=torch.float32)
        for batch in Forward.micro_batches(self, source, steps, dealt, Ranks(rank, count)):  # type: ignore
            read += batch.sample_ids if batch else []
            passed[0] += 1
        ran.append(begun)
    assert all(begun == ran[0] for begun in ran)
    rounds = sum(map(len, dealt))
    assert len(ran[0]) < rounds, "micro-batches share rows of the target"
    assert sorted(read) == sorted(2 * list(range(300)))


def source_of(lengths: list[int]) -> LiveSource:
    samples = [Sample(k, [0] * n, [1] * n) for k, n in enumerate(lengths)]
    return LiveSource(SimpleNamespace(row_tokens=BUDGET), samples, row_tokens=BUDGET)  # type: ignore


def batch_of(row: list[int]) -> FeatureBatch:
    nothing = torch.zeros(1, dtype=torch.long)
    return FeatureBatch(row, [1] * len(row), torch.zeros(1), nothing, nothing)
