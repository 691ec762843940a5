"""Taps, the row plan, and extraction against an independent forward on every family."""

import sys
import types

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.config import FeaturesConfig, TargetConfig
from draftsmith.core import Sample, UserError
from draftsmith.extract.plan import plan_shards
from draftsmith.target.forward import RowStates, StatesForward
from draftsmith.target.load import (
    eos_ids,
    final_norm,
    inspect_target,
    load_outside,
    load_target,
    text_decoder,
    unembed,
)
from draftsmith.target.rows import plan_rows
from draftsmith.target.taps import auto_taps, resolve_taps
from tiny_models import CONFIGS, MORE, assets, build, random_ids


def test_auto_taps_are_zlabs():
    assert auto_taps(64, 5) == [1, 16, 31, 46, 61]
    assert auto_taps(36, 5) == [1, 9, 17, 25, 33]
    assert auto_taps(36, 1) == [18]
    with pytest.raises(UserError, match="num_taps"):
        resolve_taps(FeaturesConfig(num_taps=5), 4)
    assert resolve_taps(FeaturesConfig(taps=[0, 2]), 4) == [0, 2]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80),
    budget=st.integers(1, 600),
    seed=st.integers(0, 3),
)
def test_row_plan(lengths, budget, seed):
    plan = plan_rows(lengths, tokens_per_batch=budget, seed=seed)
    assert sorted(i for row in plan.rows for i in row) == list(range(len(lengths)))
    for row in plan.rows:
        longest = max(lengths[i] for i in row)
        assert len(row) == 1 or longest * len(row) <= budget
        assert lengths[row[0]] == longest
    assert plan.padded_tokens >= plan.num_tokens == sum(lengths)
    assert plan == plan_rows(lengths, tokens_per_batch=budget, seed=seed), "a pure function"
    shards = plan_shards(plan, lengths, bytes_per_token=10, shard_bytes=1000)
    assert [row for shard in shards for row in shard] == plan.rows
    for shard in shards[:-1]:
        assert sum(lengths[i] for row in shard for i in row) * 10 >= 1000
        assert sum(lengths[i] for row in shard[:-1] for i in row) * 10 < 1000


@pytest.mark.parametrize("family", list(CONFIGS | MORE))
def test_extracted_states_equal_each_samples_own_forward(family):
    """Against hidden_states of a forward of its own, one sample at a time, on the whole model."""
    model = build(family)
    num_layers = model.config.num_hidden_layers
    taps = [0, num_layers - 2]
    samples = [Sample(i, random_ids(n, i), [1] * n) for i, n in enumerate((31, 5, 64, 17))]
    want = {}
    for sample in samples:
        out = model(torch.tensor([sample.input_ids]), output_hidden_states=True, use_cache=False)
        want[sample.sample_id] = (
            torch.stack([out.hidden_states[t + 1][0] for t in taps], 1),
            out.logits[0].argmax(-1),
        )
    for final in ("argmax", "none"):
        forward = StatesForward(model, taps, final, torch.float32)
        for features in forward(samples).features():
            hidden, argmax = want[features.sample.sample_id]
            torch.testing.assert_close(features.hidden, hidden, rtol=0, atol=1e-4)
            if final == "argmax":
                assert (features.extra["argmax"] == argmax).float().mean() > 0.98, (
                    "but for near ties"
                )
    layers = text_decoder(model).layers
    assert len(layers) == num_layers - 1, "cut after the last tap"


def test_final_state_is_before_the_final_norm():
    model = build("qwen3_5")
    sample = Sample(0, random_ids(20), [1] * 20)
    (features,) = StatesForward(model, [1], "state", torch.float32)([sample]).features()
    normed = model.model.norm(features.extra["final"])
    want = model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(normed, want, rtol=0, atol=1e-4)


def _row_of(sample: Sample, hidden: torch.Tensor) -> RowStates:
    host = {"hidden": hidden, "peaks": torch.linalg.vector_norm(hidden, float("inf"), dim=-1)}
    return RowStates([sample], [(0, len(hidden))], host, [3, 5], None)


def test_zero_and_nan_states_stop_and_are_named():
    sample = Sample(17, [1, 2], [1, 1])
    for bad, words in ((0.0, "all-zero"), (float("nan"), "NaN"), (float("inf"), "infinite")):
        hidden = torch.ones(2, 2, 4)
        hidden[:, 1] = bad
        with pytest.raises(UserError, match="sample 17, tap 5") as error:
            _row_of(sample, hidden).features()
        assert words in str(error.value)


def test_a_vlm_checkpoint_loads_as_its_text_model_bit_for_bit(tmp_path):
    from tiny_models import BASE, GDN

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1], "mrope_interleaved": True}  # fmt: skip
    text = {**BASE, "num_hidden_layers": 4, "head_dim": 16, **GDN, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
              "out_hidden_size": 64, "num_position_embeddings": 16}  # fmt: skip
    torch.manual_seed(0)
    whole = tf.Qwen3_5ForConditionalGeneration(
        tf.Qwen3_5Config(text_config=text, vision_config=vision)
    ).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    whole = tf.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    target = TargetConfig(model=str(tmp_path), device="cpu")
    info = inspect_target(target)
    assert (info.model_type, info.num_layers, info.rope_theta) == ("qwen3_5_text", 4, 1e7)
    model = load_target(target)
    ids = torch.tensor([random_ids(12)])
    want = whole.model.language_model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(text_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state, want)


def test_every_end_token_ends_an_answer():
    from draftsmith.target.load import load_tokenizer

    target = TargetConfig(model=str(assets() / "tiny-hybrid"))
    tokenizer = load_tokenizer(target)
    names = tokenizer.convert_ids_to_tokens(eos_ids(tokenizer, target))
    assert set(names) == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("family", list(CONFIGS | MORE))
def test_what_the_drafter_borrows_is_read_without_the_other_layers(family, tmp_path):
    build(family).save_pretrained(tmp_path)
    target = TargetConfig(model=str(tmp_path), dtype="float32", device="cpu")
    whole, outside = load_target(target), load_outside(target)
    cut = 6 if family == "gemma4" else 1  # a tensor of its embedding holds a part for every layer
    assert len(text_decoder(outside).layers) == cut <= len(text_decoder(whole).layers)
    for one, two in zip(unembed(whole), unembed(outside), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
    norms = [final_norm(model).state_dict() for model in (whole, outside)]
    assert norms[0] and all(torch.equal(norms[0][name], norms[1][name]) for name in norms[0])


def test_kernels_for_a_gpu_beside_a_model_on_the_cpu_are_refused(monkeypatch):
    """As where Transformers found fla: it calls its kernels for CPU tensors too."""
    target = TargetConfig(model=str(assets() / "tiny-hybrid"), device="cpu", dtype="float32")
    load_target(target)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    with pytest.raises(UserError, match="pip uninstall fla-core"):
        load_target(target)
    load_outside(target)  # what the drafter borrows calls none
