"""Which rank reads what, and when a live target runs: the same moment on every rank."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.config import TargetConfig
from draftsmith.core import Sample
from draftsmith.features import FeatureBatch, epoch_plan
from draftsmith.ranks import Ranks
from draftsmith.target.forward import StatesForward
from draftsmith.target.load import load_target
from draftsmith.target.rows import joined_rows
from draftsmith.train.live import LiveSource
from draftsmith.train.microbatch import Forward
from draftsmith.train.schedule import Step, deal, turns
from tiny_models import assets, random_ids

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


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_states_are_those_of_one_at_a_time(rank, begin):
    """Micro-batches that are computed together, empty ones among them, and from within an epoch on."""
    lengths = np.random.default_rng(1).integers(4, 60, 40).tolist()
    samples = [Sample(k, random_ids(n, k), [1] * n) for k, n in enumerate(lengths)]
    target = load_target(TargetConfig(model=str(assets() / "tiny-hybrid"), dtype="float32"))
    forward = StatesForward(target, [1, 3], "none", torch.float32, row_tokens=128)
    live = LiveSource(forward, samples, row_tokens=128)
    steps = planned(lengths, 5)
    dealt = list(deal(steps, lengths, 2))
    self = SimpleNamespace(_flex=False, device=torch.device("cpu"), _dtype=torch.float32)
    mine = [each[rank] for of_step in dealt[begin:] for each in of_step]
    args: Any = (self, live, steps[begin:], dealt[begin:], Ranks(rank, 2))
    batches = list(Forward.micro_batches(*args))
    assert [] in mine and len(batches) == len(mine)
    for row, batch in zip(mine, batches, strict=True):
        if batch is None:
            assert row == []
            continue
        assert batch.sample_ids == row
        parts = batch.hidden.split([lengths[i] for i in row])
        for i, states in zip(row, parts, strict=True):
            (alone,) = forward([samples[i]]).features()
            torch.testing.assert_close(states, alone.hidden, rtol=1e-4, atol=1e-4)
