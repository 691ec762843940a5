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
from draftsmith.drafter.attention import (
    TILE,
    by_sample,
    flex_mask,
    visibility,
    whole_tiles,
)
from draftsmith.drafter.blocks import Blocks, dpace_weights, draw_anchors, make_blocks, slot_weights
from draftsmith.drafter.checkpoint import load_drafter, save_drafter
from draftsmith.drafter.config import DrafterShape, zlab_config
from draftsmith.drafter.loss import block_loss, linear_loss
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


def forward(drafter: DFlash, blocks: Blocks, features, num_context=None):
    """Of a row of whole samples; `num_context`: by FlexAttention over so many context tokens."""
    B = drafter.shape.block_size

    def mask(kind):
        options = {"window": drafter.shape.window(kind), "causal": drafter.shape.is_causal(kind)}
        if num_context is None:
            return by_sample(blocks, B, **options)
        return flex_mask(blocks, num_context, B, **options)

    masks = {kind: mask(kind) for kind in set(drafter.shape.layer_types)}
    noise, positions = drafter.embed(blocks.block_ids)[None], blocks.positions[None]
    context = blocks.context_positions[None]
    return drafter(noise, positions, features, context, masks, num_context=num_context)


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
    ids = torch.tensor(random_ids(S))
    features = torch.randn(1, S, 2, 64)
    anchors = np.array([0, 3, 9, 10, 20])
    blocks = make_blocks(ids, torch.ones_like(ids), [S], [anchors], drafter.shape)
    got = forward(drafter, blocks, features)
    for i, anchor in enumerate(anchors):
        noise = drafter.embed(torch.tensor([[ids[anchor], *[5] * (B - 1)]]))
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
    starts = sorted(data.draw(st.integers(0, S - 1)) for _ in range(A))
    got = visibility(torch.tensor(starts), S, B, window=window, causal=causal)
    assert got.shape == (A * B, S + A * B)
    for q in range(A * B):
        at = starts[q // B] + q % B
        for k in range(S + A * B):
            if k < S:
                want = k < starts[q // B] and (window is None or at - k < window)
            else:
                same, back = (k - S) // B == q // B, q % B - (k - S) % B
                near = window is None or -window < back < window
                want = same and near and (back >= 0 or not causal)
            assert bool(got[q, k]) == want, (q, k)


LENGTHS = [50, 130, 77]


def row_of(B: int, lengths=LENGTHS, limit=20, fill=False) -> tuple[torch.Tensor, Blocks]:
    N = sum(lengths)
    ids = torch.tensor(random_ids(N))
    anchors = [
        draw_anchors(np.ones(n, np.uint8), limit=limit, seed=0, epoch=0, sample_id=i)
        for i, n in enumerate(lengths)
    ]
    count = whole_tiles(sum(map(len, anchors)), B) if fill else None
    return ids, make_blocks(
        ids, torch.ones(N, dtype=torch.uint8), lengths, anchors, shape(block=B), num_blocks=count
    )


@pytest.mark.parametrize("lengths", [LENGTHS, [40, 900]])
@pytest.mark.parametrize("window", [None, 7, 500])
@pytest.mark.parametrize("B, causal", [(4, True), (10, True), (16, False)])
def test_tiles_hold_what_the_dense_masks_show(B, causal, window, lengths):
    N = -(-sum(lengths) // TILE) * TILE
    _, blocks = row_of(B, lengths, limit=200, fill=True)
    Q, options = len(blocks.block_ids), {"window": window, "causal": causal}
    tiled = flex_mask(blocks, N, B, **options)
    cells = tiled.mask_mod(*torch.zeros(2), torch.arange(Q)[:, None], torch.arange(N + Q)[None])
    want = torch.zeros_like(cells)
    dense = by_sample(blocks, B, **options)
    for (first, last, begin, end), mask in zip(dense.spans, dense.masks, strict=True):
        own = slice(begin * B, end * B)
        want[own, first:last] = mask[:, : last - first]
        want[own, N + begin * B : N + end * B] = mask[:, last - first :]
    assert torch.equal(cells[: end * B], want[: end * B])
    by_tile = cells.view(Q // TILE, TILE, -1, TILE)
    listed = tiled.to_dense()[0, 0].bool()
    assert (listed >= by_tile.any(3).any(1)).all(), "a tile with something to see is left out"
    full = torch.zeros_like(listed)
    for row, count in enumerate(tiled.full_kv_num_blocks[0, 0]):
        full[row, tiled.full_kv_indices[0, 0, row, :count].long()] = True
    assert (full <= by_tile.all(3).all(1)).all(), "a tile that is not all visible counts as such"
    assert full.any() == (lengths != LENGTHS and window != 7)


def test_flex_attention_gives_the_numbers_of_dense_masks():
    """Forward; torch has no backward of it on CPUs: tests/e2e/test_gpu_train.py."""
    drafter = drafter_for(shape(block=8, window=30))
    features = torch.randn(1, sum(LENGTHS), 2, 64)
    dense, tiled = (
        forward(drafter, row_of(8, fill=n is not None)[1], features, n)[0, : 60 * 8]
        for n in (None, 3 * TILE)
    )
    torch.testing.assert_close(tiled, dense, rtol=0, atol=2e-5 * float(dense.abs().max()))


@pytest.mark.parametrize("num_context", [None, TILE])
def test_nothing_moves_that_must_not(num_context):
    """Features at and after the anchor, other samples and other blocks change nothing; earlier ones do."""
    drafter, lengths = drafter_for(shape(block=4)), [20, 20]
    ids = torch.tensor(random_ids(40))
    anchors = [np.array([6, 12]), np.array([4])]
    features = torch.randn(1, 40, 2, 64)

    def hidden(ids, features):
        count = None if num_context is None else whole_tiles(3, 4)
        ones = torch.ones(40, dtype=torch.uint8)
        blocks = make_blocks(ids, ones, lengths, anchors, drafter.shape, num_blocks=count)
        return forward(drafter, blocks, features, num_context)[0, :12]

    base = hidden(ids, features)
    for at in range(40):
        moved = features.clone()
        moved[0, at] += 3
        change = (hidden(ids, moved) - base).abs().amax(-1)
        seen = [bool((change[b * 4 : b * 4 + 4] > 1e-4).any()) for b in range(3)]
        assert seen == [at < 6, at < 12, 20 <= at < 24], at
        assert [bool(change[b * 4 : b * 4 + 4].max() == 0) for b in range(3)] == [
            not x for x in seen
        ]
    other = ids.clone()
    other[12] = (other[12] + 1) % VOCAB  # the second block's anchor token
    change = (hidden(other, features) - base).abs().amax(-1)
    assert change[:4].max() == change[8:].max() == 0 and change[4:8].max() > 1e-3


def test_labels_stop_at_unsupervised_tokens_and_at_the_end():
    its_shape = shape(block=4)
    ids = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23])
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1])
    anchors = [np.array([2, 3, 6]), np.array([0])]
    blocks = make_blocks(ids, mask, [8, 4], anchors, its_shape, num_blocks=5)
    assert blocks.valid.view(5, 4).tolist() == [
        [False, True, True, False],  # 13, 14, then 15 is not supervised
        [False, True, False, False],  # 14; 16 and 17 come after a gap
        [False, True, False, False],  # 17, then another sample
        [False, True, True, True],
        [False] * 4,  # fills up
    ]
    assert blocks.labels.view(5, 4)[0].tolist()[1:3] == [13, 14]
    assert blocks.block_ids.view(5, 4).tolist()[:4] == [
        [12, 5, 5, 5], [13, 5, 5, 5], [16, 5, 5, 5], [20, 5, 5, 5]
    ]  # fmt: skip
    assert blocks.positions.view(5, 4)[2:4].tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert blocks.spans == [(0, 8, 0, 3), (8, 12, 3, 4)]
    assert blocks.context_positions.tolist() == [*range(8), *range(4)]
    assert blocks.labelled.tolist() == [1, 2, 5, 9, 13, 14, 15]
    targets = torch.arange(100, 112)
    blocks = make_blocks(ids, mask, [8, 4], anchors, its_shape, argmax_N=targets)
    assert blocks.labels.view(4, 4)[0].tolist()[1:3] == [102, 103], "after the token before"
    want = torch.exp(-torch.tensor([0.0, 1.0]) / 4)
    torch.testing.assert_close(slot_weights(4, 4.0)[1:3], want)
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
    ids = torch.tensor([*random_ids(12), *random_ids(12, 1)])
    anchors = [np.array([1, 9, 10]), np.array([3])]
    blocks = make_blocks(ids, torch.ones_like(ids), [12, 12], anchors, drafter.shape)
    hidden = torch.randn(16, 64, requires_grad=True)
    loss = block_loss(drafter, hidden, blocks, slot_weights(4, 4.0))
    want, weight = torch.zeros(()), 0.0
    correct = torch.zeros(4, 4, dtype=torch.bool)
    for a, (p, end) in enumerate([(1, 12), (9, 12), (10, 12), (15, 24)]):
        for k in range(1, 4):
            if p + k < end:
                logits = drafter.logits(hidden[a * 4 + k])
                want = want + np.exp(-(k - 1) / 4) * F.cross_entropy(logits, ids[p + k])
                weight += np.exp(-(k - 1) / 4)
                correct[a, k] = logits.argmax() == ids[p + k]
    torch.testing.assert_close(loss.weighted_sum, want)
    assert loss.weight_sum.item() == pytest.approx(weight)
    assert torch.equal(loss.correct, correct)
    grads = [
        torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (loss.weighted_sum, want)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("name", ["ce", "kl", "tv"])
def test_losses_and_their_gradients_are_those_of_plain_torch(name, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    teacher, head = torch.randn(7, 16, dtype=torch.float64), torch.randn(50, 16).double()
    labels = torch.randint(50, (7,))

    def probabilities(states):
        logits = states @ head.T
        return (softcap * torch.tanh(logits / softcap) if softcap else logits).softmax(-1)

    q, p = probabilities(hidden), probabilities(teacher)
    plain = {
        "ce": -q.log().gather(1, labels[:, None])[:, 0],
        "kl": (p * (p / q).log()).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
    }[name]
    got, probability, hit = linear_loss(
        hidden, head, labels, name=name, teacher_MH=teacher, softcap=softcap
    )
    assert torch.equal(hit, q.argmax(-1) == labels)
    torch.testing.assert_close(got.double(), plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(probability.double(), q[torch.arange(7), labels], atol=1e-6, rtol=0)
    weights = torch.linspace(-1, 2, 7).double()
    want, mine = (torch.autograd.grad((x * weights).sum(), hidden)[0] for x in (plain, got))
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)


def test_tv_is_one_less_the_acceptance_of_sampled_drafts():
    """sum min(p, q) = the probability that speculative sampling keeps a draft drawn from q."""
    torch.manual_seed(1)
    head, hidden, teacher = torch.randn(9, 4), torch.randn(3, 4), torch.randn(3, 4)
    tv, _, _ = linear_loss(
        hidden, head, torch.zeros(3, dtype=torch.long), name="tv", teacher_MH=teacher
    )
    p, q = ((x @ head.T).softmax(-1) for x in (teacher, hidden))
    torch.testing.assert_close(1 - tv, torch.minimum(p, q).sum(-1))


def test_dpace_weighs_a_slot_by_what_depends_on_it():
    q = torch.tensor([[0.9, 0.5, 0.2, 0.7]])
    valid = torch.tensor([[False, True, True, False]])
    c1, c2 = 0.5 * 0.5 + 0.5, 0.5 * 0.2 + 0.5
    want = torch.tensor([[0.0, c1 + c1 * c2, c1 * c2, 0.0]])
    torch.testing.assert_close(dpace_weights(q, valid), want)


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
