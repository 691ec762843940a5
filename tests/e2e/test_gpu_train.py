"""Training on a GPU: FlexAttention's numbers and gradients, compiled losses, both sources, a whole run."""

import json

import pytest
import torch
from runs import command, write_config

from draftsmith import configfile, train
from draftsmith import tokenize as tokenize_stage
from draftsmith.config import RunConfig
from draftsmith.drafter.attention import TILE, by_sample, flex_mask, whole_tiles
from draftsmith.drafter.blocks import draw_anchors, make_blocks
from draftsmith.drafter.config import DrafterShape
from draftsmith.drafter.loss import linear_loss
from draftsmith.drafter.model import DFlash
from draftsmith.ranks import Ranks
from draftsmith.train.sources import open_source

pytestmark = pytest.mark.gpu
LENGTHS = [700, 90, 1200]


def shape(kinds: tuple[str, ...]) -> DrafterShape:
    return DrafterShape(
        hidden_size=256, intermediate_size=512, num_layers=len(kinds), num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=4096, vocab_size=1000, layer_types=kinds, sliding_window=100,
        block_size=16, mask_token_id=5, taps=(1, 3), num_target_layers=8,
    )  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_flex_attention_gives_the_numbers_and_gradients_of_dense_masks(kind, compiled):
    torch.manual_seed(0)
    its = shape((kind,) * 2)
    drafter = DFlash(its).init_weights(0).cuda()
    drafter.share(*(torch.randn(1000, 256, device="cuda") for _ in range(2)))
    N, B = sum(LENGTHS), its.block_size
    ids, mask = torch.randint(1000, (N,)), torch.ones(N, dtype=torch.uint8)
    features = torch.randn(1, N, 2, 256, device="cuda")
    anchors = [
        draw_anchors(mask[:n].numpy(), limit=100, seed=0, epoch=0, sample_id=i)
        for i, n in enumerate(LENGTHS)
    ]
    count = sum(map(len, anchors))
    num_context, found = 16 * TILE, []
    seen = {"window": its.window(kind), "causal": its.is_causal(kind)}
    for flex in (False, True):
        if flex and compiled:
            for layer in drafter.layers:
                layer.compile(dynamic=False)
        blocks = make_blocks(
            ids, mask, LENGTHS, anchors, its, num_blocks=whole_tiles(count, B) if flex else None
        ).to(torch.device("cuda"))
        masks = {
            kind: flex_mask(blocks, num_context, B, **seen)
            if flex
            else by_sample(blocks, B, **seen)
        }
        hidden = drafter(
            drafter.embed(blocks.block_ids)[None], blocks.positions[None], features,
            blocks.context_positions[None], masks, num_context=num_context if flex else None,
        )[0, : count * B]  # fmt: skip
        drafter.zero_grad()
        (
            hidden * torch.linspace(-1, 1, hidden.numel(), device="cuda").view_as(hidden)
        ).sum().backward()
        found.append([hidden.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for dense, tiled in zip(*found, strict=True):
        assert ((tiled - dense).norm() / dense.norm()).item() < 5e-3  # TF32 in Triton's products


@pytest.mark.parametrize("name", ["ce", "kl", "tv"])
def test_compiled_losses_are_the_formulas(name):
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, 700, 64, device="cuda").bfloat16().unbind(0)
    head, labels = (
        torch.randn(150_000, 64, device="cuda").bfloat16() * 0.2,
        torch.arange(700).cuda(),
    )
    found = []
    for place in ("cuda", "cpu"):
        x = hidden.to(place).float().requires_grad_()
        losses, _, hit = linear_loss(
            x.bfloat16() if place == "cuda" else x,
            head.to(place) if place == "cuda" else head.cpu().float(),
            labels.to(place), name=name, teacher_MH=teacher.to(place).float(),
        )  # fmt: skip
        losses.mean().backward()
        found.append([losses.detach().cpu(), x.grad.cpu(), hit.cpu().float()])
    for mine, plain in zip(*found, strict=True):
        assert ((mine - plain).norm() / plain.norm().clamp_min(1e-6)).item() < 2e-2


def on_gpu(path, **changes) -> RunConfig:
    cfg = configfile.load(path, {"target.device": "cuda", "target.dtype": "bfloat16", **changes})
    return cfg


def test_live_features_are_the_stores_within_bf16(tmp_path):
    path = write_config(tmp_path)
    gpu = ["--target.device", "cuda", "--target.dtype", "bfloat16"]
    for stage in ("prepare", "regenerate", "tokenize", "extract"):
        done = command(stage, path, *gpu, fresh=True)
        assert done.returncode == 0, done.stderr
    cfg = on_gpu(path)
    taps = list(train.drafter_shape(cfg).taps)
    tokens = tokenize_stage.finished(cfg)
    stored, live = (open_source(cfg, tokens, taps, kind, Ranks()) for kind in ("store", "live"))
    rows = [[0, 3], [1], [2, 5, 4]]
    for one, two in zip(
        stored.source.batches(rows, pinned=True),
        live.source.batches(rows, pinned=False),
        strict=True,
    ):
        assert one.sample_ids == two.sample_ids and torch.equal(one.input_ids, two.input_ids)
        apart = (one.hidden.float() - two.hidden.cpu().float()).norm() / one.hidden.float().norm()
        assert apart < 0.02


@pytest.mark.parametrize("source", ["store", "live"])
def test_a_run_trains_and_accepts(source, tmp_path):
    """A whole small run on the GPU: the loss falls, and the drafter is accepted more than an untrained one."""
    path = write_config(
        tmp_path, prompts=200, features={"source": source},
        train={"epochs": 6, "anchors_per_sample": 16, "tokens_per_step": 1024, "micro_batch_tokens": 1024},
        evaluate={"methods": ["ar", "chain", "untrained"], "max_prompts": 8},
    )  # fmt: skip
    done = command("run", path, "--target.device", "cuda", "--target.dtype", "bfloat16", fresh=True)
    assert done.returncode == 0, done.stderr
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert losses[-1] < 0.7 * losses[0]
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    methods = report["suites"][0]["methods"]
    assert methods["chain"]["tau_pooled"] > methods["untrained"]["tau_pooled"]
