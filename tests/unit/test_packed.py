"""Packed rows are exact: every sample as if it were alone, at every layer, on every packable family."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core import FaultFound, Sample
from draftsmith.target import packed as packed_module
from draftsmith.target.forward import StatesForward
from draftsmith.target.load import text_decoder
from draftsmith.target.packed import can_pack, pack, packed
from draftsmith.target.rows import plan_mixed_rows, plan_packed_rows
from draftsmith.target.selftest import self_test
from draftsmith.target.taps import capture
from tiny_models import GDN_FAMILIES, build, random_ids

LENGTHS = (37, 64, 91, 5, 1, 130)


def states(decoder, **inputs) -> list[torch.Tensor]:
    layers = list(range(len(decoder.layers)))
    with capture(decoder, layers) as seen, torch.no_grad():
        decoder(use_cache=False, **inputs)
    return [seen[i][0] for i in layers]


def worst_difference(family: str) -> float:
    """Packed against alone, over every layer, sample and cell."""
    model = build(family)
    decoder = text_decoder(model)
    samples = [random_ids(n, seed) for seed, n in enumerate(LENGTHS)]
    row = pack(samples, pad_to=400)
    with packed(model, decoder, row):
        got = states(decoder, input_ids=row.input_ids, position_ids=row.position_ids)
    worst = 0.0
    for i, sample in enumerate(samples):
        alone = states(decoder, input_ids=torch.tensor([sample]))
        for mine, want in zip(got, alone, strict=True):
            part = mine[row.bounds[i] : row.bounds[i + 1]]
            worst = max(worst, float((part - want).abs().max()))
    return worst


@pytest.mark.parametrize("family", [*GDN_FAMILIES, "qwen3_5_moe", "qwen3", "llama", "gemma3"])
def test_a_packed_sample_is_as_if_alone(family):
    assert can_pack(text_decoder(build(family)).config.model_type)
    assert worst_difference(family) < 1e-4


def test_families_that_are_not_proven_are_not_packed():
    for family in ("bamba",):
        assert not can_pack(text_decoder(build(family)).config.model_type)


def plant(monkeypatch, leak: str) -> None:
    """Make packed rows leak over the samples' boundaries."""
    if leak == "convolution":
        real = packed_module._conv
        monkeypatch.setattr(packed_module, "_conv", lambda row: real(pack([[0] * row.bounds[-1]])))
    elif leak == "state":
        real_rule = packed_module._rule
        monkeypatch.setattr(
            packed_module,
            "_rule",
            lambda original, row: real_rule(original, pack([[0] * row.bounds[-1]])),
        )
    elif leak == "attention":
        real_attention = packed_module._attention

        def one_sample(*args, **kwargs):
            packed_module._rows.append(pack([[0] * args[1].shape[2]]))
            try:
                return real_attention(*args, **kwargs)
            finally:
                packed_module._rows.pop()

        monkeypatch.setattr(packed_module, "_attention", one_sample)
    else:
        assert leak == "positions"

        def running_on(samples, **options):
            row = pack(samples, **options)
            positions = torch.arange(row.bounds[-1])[None]
            return replace(row, position_ids=positions)

        monkeypatch.setattr("draftsmith.target.forward.pack", running_on)


@pytest.mark.parametrize("leak", ["convolution", "state", "attention"])
def test_each_leak_shows(monkeypatch, leak):
    """The same comparison fails when the convolution or the state is not reset, or attention leaks.
    (Positions that run on change nothing: rotary attention sees differences only.)
    """
    plant(monkeypatch, leak)
    assert worst_difference("qwen3_5") > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leak", [None, "convolution", "state", "attention", "positions"])
def test_the_self_test_stops_a_leak(monkeypatch, leak, dtype):
    """On the weights as loaded, whatever the dtype, with its noise floor beside it."""
    samples = [Sample(i, random_ids(200, i), [1] * 200) for i in range(5)]
    family = "qwen3" if leak == "attention" else "qwen3_5"  # whose one attention layer is the last
    forward = StatesForward(build(family, dtype), [0, 1, 2], "none", dtype, row_tokens=500)
    if leak is None:
        numbers = self_test(forward, samples)
        assert len(numbers["packed"]) == len(numbers["noise_floor"]) == 3
        return
    plant(monkeypatch, leak)
    with pytest.raises(
        FaultFound, match="positions run on" if leak == "positions" else "runs on over"
    ):
        self_test(forward, samples)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
@pytest.mark.parametrize("final", ["argmax", "state"])
def test_packed_features_equal_padded_ones(family, final):
    """Everything that is stored, in the order of the row."""
    samples = [Sample(i, random_ids(n, i), [1] * n) for i, n in enumerate(LENGTHS)]
    taps = [0, 2]
    rows = []
    for row_tokens in (None, 400):
        forward = StatesForward(build(family), taps, final, torch.float32, row_tokens=row_tokens)
        rows.append(forward(samples).features())
    for padded, mine in zip(*rows, strict=True):
        assert padded.sample is mine.sample
        torch.testing.assert_close(mine.hidden, padded.hidden, rtol=0, atol=1e-4)
        if final == "state":
            torch.testing.assert_close(
                mine.extra["final"], padded.extra["final"], rtol=0, atol=1e-4
            )
        else:
            assert (mine.extra["argmax"] == padded.extra["argmax"]).float().mean() > 0.98


def test_the_model_is_as_before_afterwards():
    model = build("qwen3_5")
    decoder, ids = text_decoder(model), torch.tensor([random_ids(20)])
    before = states(decoder, input_ids=ids)
    with pytest.raises(RuntimeError, match="stop"), packed(model, decoder, pack([random_ids(9)])):
        raise RuntimeError("stop")
    for a, b in zip(before, states(decoder, input_ids=ids), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("plan_of", [plan_packed_rows, plan_mixed_rows])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=400), st.integers(16, 256), st.integers(0, 3))
def test_packed_rows_hold_every_sample_once_within_the_budget(plan_of, lengths, budget, seed):
    plan = plan_of(lengths, tokens_per_batch=budget, seed=seed)
    assert sorted(i for row in plan.rows for i in row) == list(range(len(lengths)))
    for row in plan.rows:
        assert len(row) == 1 or sum(lengths[i] for i in row) <= budget
    assert plan == plan_of(lengths, tokens_per_batch=budget, seed=seed)


@pytest.mark.parametrize(
    ("plan_of", "row", "fill"), [(plan_packed_rows, 16384, 0.98), (plan_mixed_rows, 32768, 0.97)]
)
def test_rows_are_nearly_full(plan_of, row, fill):
    generator = torch.Generator().manual_seed(0)
    for median, sigma in ((60, 0.8), (400, 0.8), (2000, 0.6)):
        drawn = torch.exp(torch.randn(20_000, generator=generator) * sigma) * median
        lengths = drawn.long().clamp(16, 8192).tolist()
        plan = plan_of(lengths, tokens_per_batch=row, seed=1)
        assert plan.num_tokens / plan.padded_tokens > fill


def test_mixed_rows_are_each_like_the_whole():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.exp(torch.randn(20_000, generator=generator) * 0.6) * 60
    lengths = drawn.long().clamp(8, 500).tolist()
    counts = {}
    for plan_of in (plan_packed_rows, plan_mixed_rows):
        sizes = [len(row) for row in plan_of(lengths, tokens_per_batch=1024, seed=1).rows]
        counts[plan_of] = torch.tensor(sizes).float().std().item()
    assert counts[plan_mixed_rows] < 2 < counts[plan_packed_rows]
