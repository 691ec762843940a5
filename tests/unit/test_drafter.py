"""The drafter is z-lab's: the same numbers as the package `dflash` on the same weights, and masks cell by cell."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3Config

from draftsmith.drafter import loss as loss_module
from draftsmith.drafter.blocks import draw_anchors, make_blocks, slot_weights, visibility
from draftsmith.drafter.checkpoint import load_drafter, save_drafter
from draftsmith.drafter.config import DrafterShape, zlab_config
from draftsmith.drafter.loss import block_loss, leading_correct
from draftsmith.drafter.model import ContextCache, DFlash
from draftsmith.drafter.published import shape_from
from draftsmith.files import new_folder
from tiny_models import VOCAB, build, random_ids

MIXED = ("sliding_attention", "full_attention")


def shape(layer_types=MIXED, block=5, window=7, taps=(1, 3)) -> DrafterShape:
    return DrafterShape(
        hidden_size=64, intermediate_size=96, num_layers=len(layer_types), num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512,
        vocab_size=VOCAB, layer_types=tuple(layer_types), sliding_window=window, block_size=block,
        mask_token_id=5, taps=tuple(taps), num_target_layers=8,
    )  # fmt: skip


def drafter_for(its_shape: DrafterShape, seed=0) -> DFlash:
    torch.manual_seed(seed)
    drafter = DFlash(its_shape)
    for p in drafter.parameters():  # norms too, so that a wrong one shows
        torch.nn.init.normal_(p, mean=1.0 if p.ndim == 1 else 0.0, std=0.2)
    table = torch.randn(VOCAB, 64)
    return drafter.eval().requires_grad_(False).share(table, table)


def zlab_twin(drafter: DFlash):
    dflash = pytest.importorskip("dflash.model")
    config = Qwen3Config(**zlab_config(drafter.shape, "float32"))
    config._attn_implementation = "sdpa"
    twin = dflash.DFlashDraftModel(config).eval()
    assert set(twin.state_dict()) == set(drafter.state_dict()), "z-lab's names, all of them"
    twin.load_state_dict(drafter.state_dict())
    return twin


@pytest.mark.parametrize("kinds", [("full_attention",) * 2, ("sliding_attention",) * 2, MIXED])
def test_training_forward_equals_the_dflash_package(kinds):
    drafter = drafter_for(shape(kinds))
    twin = zlab_twin(drafter)
    S, B = 23, 5
    ids = torch.tensor([random_ids(S)])
    features = torch.randn(1, S, 2, 64)
    anchors = np.array([0, 3, 9, 10, 20])
    blocks = make_blocks(ids, torch.ones_like(ids), [anchors], drafter.shape, slot_weights(B, 4.0))
    context_positions = torch.arange(S)[None]
    got = drafter(
        drafter.embed(blocks.block_ids), blocks.positions, features, context_positions, blocks.masks
    )
    for i, anchor in enumerate(anchors):
        noise = drafter.embed(torch.tensor([[ids[0, anchor], *[5] * (B - 1)]]))
        want = twin(
            position_ids=torch.arange(anchor + B)[None],
            noise_embedding=noise,
            target_hidden=features[:, :anchor].flatten(2),
        )
        torch.testing.assert_close(got[:, i * B : (i + 1) * B], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("kinds", [("full_attention",) * 2, MIXED])
def test_cached_drafting_equals_the_dflash_package(kinds, causal):
    drafter = drafter_for(dataclasses.replace(shape(kinds), causal=causal))
    twin = zlab_twin(drafter)
    features, ids = torch.randn(40, 2, 64), random_ids(40)
    cache, length = ContextCache(drafter), 0
    for take in (12, 1, 4, 5, 3, 9):
        cache.append(features[length : length + take])
        length += take
        noise = drafter.embed(torch.tensor([[ids[length], *[5] * 4]]))
        hidden = twin(
            position_ids=torch.arange(length + 5)[None],
            noise_embedding=noise,
            target_hidden=features[None, :length].flatten(2),
        )
        assert (
            drafter.draft(ids[length], cache) == drafter.logits(hidden[0, 1:]).argmax(-1).tolist()
        )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_masks_cell_by_cell(data):
    S, B = data.draw(st.integers(2, 14)), data.draw(st.integers(2, 6))
    window = data.draw(st.sampled_from([None, 1, 3, 8]))
    causal = data.draw(st.booleans())
    A = data.draw(st.integers(1, 4))
    anchors = [sorted(data.draw(st.integers(0, S - 1)) for _ in range(A)) for _ in range(2)]
    got = visibility(torch.tensor(anchors), S, B, window=window, causal=causal)
    assert got.shape == (2, 1, A * B, S + A * B)
    for b, starts in enumerate(anchors):
        for q in range(A * B):
            at = starts[q // B] + q % B
            for k in range(S + A * B):
                if k < S:
                    want = k < starts[q // B] and (window is None or at - k < window)
                else:
                    same, back = (k - S) // B == q // B, q % B - (k - S) % B
                    near = window is None or -window < back < window
                    want = same and near and (back >= 0 or not causal)
                assert bool(got[b, 0, q, k]) == want, (b, q, k)


def test_nothing_moves_that_must_not():
    """Features at and after the anchor, other samples, other blocks and padding change nothing; earlier ones do."""
    drafter = drafter_for(shape())
    ids = torch.tensor([random_ids(20), random_ids(20, 1)])
    anchors = [np.array([6, 12]), np.array([4])]
    features = torch.randn(2, 20, 2, 64)

    def forward(ids, features):
        blocks = make_blocks(
            ids, torch.ones_like(ids), anchors, drafter.shape, slot_weights(5, 4.0)
        )
        positions = torch.arange(20).expand(2, -1)
        return drafter(
            drafter.embed(blocks.block_ids), blocks.positions, features, positions, blocks.masks
        )

    base = forward(ids, features)
    for at in range(20):
        moved = features.clone()
        moved[0, at] += 3
        change = (forward(ids, moved) - base).abs().amax(-1)
        seen = [bool((change[0, :5] > 1e-4).any()), bool((change[0, 5:] > 1e-4).any())]
        assert seen == [at < 6, at < 12], at
        assert change[1].max() == 0
    other = ids.clone()
    other[0, 12] = (other[0, 12] + 1) % VOCAB  # the second block's anchor token
    change = (forward(other, features) - base).abs().amax(-1)
    assert change[0, :5].max() == 0 and change[0, 5:].max() > 1e-3


def test_labels_stop_at_unsupervised_tokens_and_at_the_end():
    its_shape = shape(block=4)
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0, 0]])
    blocks = make_blocks(ids, mask, [np.array([2, 3, 6])], its_shape, slot_weights(4, 4.0))
    assert blocks.valid.view(3, 4).tolist() == [
        [False, True, True, False],  # 13, 14, then 15 is not supervised
        [False, True, False, False],  # 14; 16 and 17 come after a gap
        [False, True, False, False],  # 17, then padding
    ]
    assert blocks.labels.view(3, 4)[0].tolist()[1:3] == [13, 14]
    assert blocks.block_ids.view(3, 4).tolist() == [[12, 5, 5, 5], [13, 5, 5, 5], [16, 5, 5, 5]]
    want = torch.exp(-torch.tensor([0.0, 1.0]) / 4)
    torch.testing.assert_close(blocks.weights.view(3, 4)[0, 1:3], want)
    assert slot_weights(16, "auto")[2] == pytest.approx(np.exp(-1 / 7))
    assert slot_weights(8, "auto")[2] == pytest.approx(np.exp(-1 / 4))


def test_anchors_are_fixed_by_seed_epoch_and_sample():
    mask = np.array([0, 1, 1, 0, 1, 1, 1, 1, 0], dtype=np.uint8)
    assert draw_anchors(mask, limit=9, seed=0, epoch=0, sample_id=0).tolist() == [1, 4, 5, 6]
    drawn = [
        draw_anchors(np.ones(99, np.uint8), limit=9, seed=0, epoch=e, sample_id=s)
        for e, s in ((0, 0), (0, 0), (1, 0))
    ]
    assert drawn[0].tolist() == drawn[1].tolist() != drawn[2].tolist()
    assert len(set(drawn[0])) == 9 and drawn[0].tolist() == sorted(drawn[0])
    assert draw_anchors(np.zeros(9, np.uint8), limit=9, seed=0, epoch=0, sample_id=0).tolist() == []


@pytest.mark.parametrize("chunk_logits", [1 << 26, VOCAB * 3])
def test_loss_equals_the_formula_in_one_chunk_and_in_many(chunk_logits, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk_logits)
    drafter = drafter_for(shape(block=4))
    ids = torch.tensor([random_ids(12), random_ids(12, 1)])
    blocks = make_blocks(
        ids,
        torch.ones_like(ids),
        [np.array([1, 9, 10]), np.array([3])],
        drafter.shape,
        slot_weights(4, 4.0),
    )
    hidden = torch.randn(2, 12, 64, requires_grad=True)
    loss = block_loss(drafter, hidden, blocks)
    want, correct = torch.zeros(()), torch.zeros(2, 3, 4, dtype=torch.bool)
    for b, anchors in enumerate([[1, 9, 10], [3]]):
        for a, p in enumerate(anchors):
            for k in range(1, 4):
                if p + k < 12:
                    logits = drafter.logits(hidden[b, a * 4 + k])
                    want = want + np.exp(-(k - 1) / 4) * F.cross_entropy(logits, ids[b, p + k])
                    correct[b, a, k] = logits.argmax() == ids[b, p + k]
    torch.testing.assert_close(loss.weighted_sum, want)
    assert torch.equal(loss.correct, correct)
    grads = [
        torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (loss.weighted_sum, want)
    ]
    torch.testing.assert_close(*grads)
    assert leading_correct(torch.tensor([[[0, 1, 1, 0], [1, 0, 1, 1]]])).tolist() == [[2, 0]]


def test_checkpoint_has_zlabs_layout_and_drafts_the_same_tokens(tmp_path):
    drafter = drafter_for(shape(MIXED * 2 + ("full_attention",)))
    drafter.load_state_dict({k: v.bfloat16().float() for k, v in drafter.state_dict().items()})
    with new_folder(tmp_path / "export") as folder:
        save_drafter(folder, drafter, torch.bfloat16)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert len(tensors) == 58 and all(t.dtype == torch.bfloat16 for t in tensors.values())
    per_layer = {name.split(".", 2)[2] for name in tensors if name.startswith("layers.")}
    assert per_layer == {
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    assert {n for n in tensors if not n.startswith("layers.")} == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    text = json.dumps(config)
    assert not any(
        word in text for word in ("partial_rotary", "mrope", "auto_map", "eagle_aux", "is_causal")
    )
    assert shape_from(config, "x") == drafter.shape
    again = load_drafter(tmp_path / "export").share(*drafter._frozen)
    caches = ContextCache(drafter), ContextCache(again)
    for cache in caches:
        cache.append(torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0)))
    assert drafter.draft(11, caches[0]) == again.draft(11, caches[1])


def test_the_targets_weights_are_shared_not_owned():
    model = build("qwen3")
    drafter = DFlash(shape()).share(model.get_input_embeddings().weight, model.lm_head.weight)
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())
    assert sum(1 for _ in drafter.parameters()) == 11 * 2 + 3
