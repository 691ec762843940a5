"""Our loop beside z-lab's `dflash` package: the same drafter, target and prompts, round by round."""

import pytest
import torch
from test_decode import decode, shape_for
from test_drafter import forward, zlab_twin

from draftsmith.decode.propose import DraftProposer, NoProposer
from draftsmith.decode.replay import replay
from draftsmith.decode.session import TargetSession
from draftsmith.drafter.blocks import make_blocks
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import unembed
from tiny_models import build, random_ids

LAYOUTS = [("full_attention", "full_attention"), ("sliding_attention", "full_attention")]


def learnt(model, prompts: list[list[int]], layers: tuple[str, ...]) -> DFlash:
    """A drafter that has learnt half of the target's greedy texts by heart: rounds of many lengths."""
    torch.manual_seed(0)
    drafter = DFlash(shape_for(model, 8, layers)).init_weights(1).share(*unembed(model))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=2e-3)
    texts = []
    for prompt in prompts:
        ids = prompt + decode(model, prompt, NoProposer(), max_new=40).tokens
        _, features = TargetSession(model, list(drafter.shape.taps)).prefill(ids)
        texts.append((torch.tensor(ids), features.clone(), len(prompt)))
    for _ in range(40):
        for ids, features, first in texts:
            anchors = torch.arange(first, len(ids) - 1).numpy()
            ones = torch.ones_like(ids)
            blocks = make_blocks(ids, ones, [len(ids)], [anchors], drafter.shape)
            hidden = forward(drafter, blocks, features[None])[0][blocks.labelled]
            loss = torch.nn.functional.cross_entropy(
                drafter.logits(hidden), blocks.labels[blocks.labelled]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("layers", LAYOUTS)
def test_same_tokens_and_rounds_as_the_dflash_package(layers, monkeypatch):
    dflash = pytest.importorskip("dflash.model")
    model = build("qwen3")
    prompts = [random_ids(n, seed=n) for n in (1, 12, 30)]
    drafter = learnt(model, prompts, layers)
    twin = zlab_twin(drafter)
    lengths = set()
    monkeypatch.setattr(dflash, "_cuda_time", lambda: 0.0)  # statistics want a GPU's clock
    for prompt, limit in zip(prompts, (60, 47, 60), strict=True):
        end = decode(model, prompt, NoProposer(), max_new=limit).tokens[33]
        for eos in (None, [end]):
            theirs = dflash.dflash_generate(
                twin, model, torch.tensor([prompt]), limit, eos, return_stats=True
            )
            ours = decode(model, prompt, DraftProposer(drafter), max_new=limit, eos=eos or ())
            assert prompt + ours.tokens == theirs.output_ids[0].tolist()
            assert ours.emitted == theirs.acceptance_lengths
            lengths |= set(ours.emitted)
        ids = prompt + ours.tokens
        _, features = TargetSession(model, list(drafter.shape.taps)).prefill(ids)
        assert replay(drafter, ids, len(prompt), features).emitted == ours.emitted
    assert len(lengths) >= 5, "rounds of many lengths"
