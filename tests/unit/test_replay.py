"""Drafting at many anchors at once gives the rounds of drafting round by round, and of the live loop."""

import pytest
import torch
from test_decode import TAPS, shape_for
from test_drafter import drafter_for, shape

from draftsmith.decode import replay as replay_module
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.propose import DraftProposer
from draftsmith.decode.replay import replay, replay_of
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import speculate
from draftsmith.drafter.model import ContextCache, DFlash
from draftsmith.serving.mismatches import known
from draftsmith.target.load import unembed
from tiny_models import build, random_ids

LAYOUTS = [
    ("full_attention", "full_attention"),
    ("sliding_attention", "full_attention"),
    ("sliding_attention", "sliding_attention"),
]


FEATURES = torch.randn(90, 2, 64, generator=torch.Generator().manual_seed(1))


def half_guessed(drafter: DFlash, features: torch.Tensor, num_prompt: int, seed: int) -> list[int]:
    """A text of its own drafts, cut at random lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids, cache = random_ids(num_prompt + 1, seed), ContextCache(drafter)
    cache.append(features[:num_prompt])
    while len(ids) <= len(features):
        begin = len(ids) - 1
        take = int(torch.randint(0, drafter.shape.block_size, (), generator=generator))
        ids += [
            *drafter.draft(ids[-1], cache)[:take],
            int(torch.randint(6, 90, (), generator=generator)),
        ]
        cache.append(features[begin : len(ids) - 1])
    return ids[: len(features) + 1]


def same_rounds(drafter: DFlash, features: torch.Tensor, budget: int | None) -> None:
    ids = half_guessed(drafter, features, 13, seed=5)
    got = replay(drafter, ids, 13, features, tree_budget=budget)
    want = replay_of(DraftProposer(drafter, tree_budget=budget), ids, 13, features)
    assert got == want and len(set(got.accepted)) > 1
    assert sum(got.emitted) == len(ids) - 1 - 13


@pytest.mark.parametrize("together", [8, 40, 1024])
@pytest.mark.parametrize("budget", [None, 5, 24])
@pytest.mark.parametrize("layers", LAYOUTS)
def test_many_anchors_at_once_are_the_rounds_one_by_one(layers, budget, together, monkeypatch):
    monkeypatch.setattr(replay_module, "TOGETHER", together)
    same_rounds(drafter_for(shape(layers, block=8, window=24)), FEATURES, budget)


@pytest.mark.parametrize("budget", [None, 12])
def test_what_a_variant_of_the_drafter_changes_acts_there_too(budget):
    """Another RoPE, causality, mask id, and a subclass that turns a part of each head."""
    drafter = drafter_for(shape(LAYOUTS[0], block=8, window=24))
    ids = half_guessed(drafter, FEATURES, 13, seed=5)
    ran = []
    for variant in [m.drafter for m in known(drafter, suspects=[7]) if not (m.shift or m.zero)]:
        same_rounds(variant, FEATURES, budget)
        ran.append(replay(variant, ids, 13, FEATURES, tree_budget=budget).accepted)
    assert sum(rounds != ran[0] for rounds in ran[1:]) > len(ran) // 2


@pytest.mark.parametrize("budget", [None, 12])
def test_the_rounds_of_the_live_loop(budget):
    model, prompt = build("qwen3_5"), random_ids(17)
    drafter = DFlash(shape_for(model, 8)).init_weights(3).eval().share(*unembed(model))
    session = TargetSession(model, TAPS)
    end = AnswerEnd(eos_ids=[], max_new_tokens=120, loop_ngram=None)
    live = speculate(session, prompt, DraftProposer(drafter, tree_budget=budget), end)
    ids = prompt + live.tokens
    _, features = TargetSession(model, TAPS).prefill(ids)
    got = replay(drafter, ids, len(prompt), features, tree_budget=budget)
    assert got.emitted == live.emitted
    assert replay(drafter, ids[: len(prompt) + 1], len(prompt), features).emitted == []
