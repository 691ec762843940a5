"""Speculative decoding is exact: the text of the autoregressive loop, whatever the proposer, on every family."""

import pytest
import torch

from draftsmith.decode import session as session_module
from draftsmith.decode.batch import generate_batch
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.gdn import gdn_steps
from draftsmith.decode.propose import DraftProposer, LookupProposer, NoProposer
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import Trace, speculate
from draftsmith.drafter.config import DrafterShape
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import unembed
from tiny_models import GDN_FAMILIES, VOCAB, build, random_ids

FAMILIES = ["qwen3", *GDN_FAMILIES]
TAPS = [1, 2]


class Oracle:
    """Proposes the true continuation, right for a random number of tokens and wrong after: every acceptance length."""

    def __init__(self, text: list[int], block: int, seed: int, wrong: int | None = None) -> None:
        self.text, self.block, self.at = text, block, 0
        self.wrong = wrong
        self.random = torch.Generator().manual_seed(seed)

    def extend(self, token_ids, features):
        self.at += len(token_ids)

    def propose(self, anchor_id):
        start = self.at + 1
        drafts = list(self.text[start : start + self.block - 1])
        right = int(torch.randint(0, self.block, (1,), generator=self.random))
        for i in range(right, len(drafts)):
            drafts[i] = (drafts[i] + 1) % VOCAB if self.wrong is None else self.wrong
        return drafts


def decode(model, prompt, proposer, *, max_new=200, eos=()) -> Trace:
    end = AnswerEnd(eos_ids=list(eos), max_new_tokens=max_new, loop_ngram=None)
    return speculate(TargetSession(model, TAPS), prompt, proposer, end)


def shape_for(
    model, block: int, layer_types=("full_attention", "sliding_attention")
) -> DrafterShape:
    return DrafterShape(
        hidden_size=64, intermediate_size=96, num_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=4096, vocab_size=VOCAB,
        layer_types=tuple(layer_types), sliding_window=24, block_size=block, mask_token_id=5, taps=tuple(TAPS),
        num_target_layers=len(model.model.layers),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_acceptance_length_leaves_the_autoregressive_text(family, dtype):
    model = build(family, dtype)
    prompt = random_ids(11)
    want = decode(model, prompt, NoProposer(), max_new=220)
    assert len(want.tokens) == 220
    assert len(set(want.tokens)) > 20, "the random target must not be stuck on one token"
    for block in (2, 5, 16):
        got = decode(model, prompt, Oracle(prompt + want.tokens, block, seed=block), max_new=220)
        assert got.tokens == want.tokens
        assert len(set(got.accepted)) >= min(block, 7), "rollbacks of many depths"


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "bamba"])
def test_drafter_lookup_and_autoregressive_agree(family):
    model = build(family)
    drafter = DFlash(shape_for(model, 8)).init_weights(3).eval().share(*unembed(model))
    for seed in range(2):
        prompt = random_ids(30, seed)
        want = decode(model, prompt, NoProposer(), max_new=80)
        for proposer in (
            DraftProposer(drafter),
            LookupProposer(7),
            Oracle(prompt + want.tokens, 8, seed),
        ):
            assert decode(model, prompt, proposer, max_new=80).tokens == want.tokens


@pytest.mark.parametrize("family", GDN_FAMILIES)
def test_committed_state_is_the_autoregressive_state(family):
    model = build(family, torch.float64)
    prompt = random_ids(9)
    want = decode(model, prompt, NoProposer(), max_new=60).tokens
    sessions = [TargetSession(model, TAPS) for _ in range(2)]
    for session in sessions:
        session.prefill(prompt)
    for token in want[:50]:
        sessions[0].verify([token])
        sessions[0].commit(1)
    oracle, at = Oracle(prompt + want, 6, seed=0), 0
    oracle.at = len(prompt)
    while at < 50:
        block = [want[at], *oracle.propose(want[at])][: 50 - at]
        logits, _ = sessions[1].verify(block)
        right = 1
        while right < len(block) and block[right] == want[at + right]:
            right += 1
        sessions[1].commit(right)
        oracle.at, at = oracle.at + right, at + right
    for one, two in zip(sessions[0].cache.layers, sessions[1].cache.layers, strict=True):
        pairs = (
            [
                (one.recurrent_states[0], two.recurrent_states[0]),
                (one.conv_states[0], two.conv_states[0]),
            ]
            if hasattr(one, "recurrent_states")
            else [(one.keys, two.keys), (one.values, two.values)]
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", GDN_FAMILIES)
def test_a_state_that_is_not_rolled_back_is_seen(family, monkeypatch):
    """The broken version: keys are dropped, the recurrent state stays advanced (what `cache.crop` leaves)."""
    model = build(family)
    prompt = random_ids(11)
    want = decode(model, prompt, NoProposer(), max_new=100)

    def keys_only(self, num_accepted):
        dropped = self._block.shape[1] - num_accepted
        if dropped:
            self._drop_keys(dropped)
        self._cut_convolutions(dropped)
        self.num_committed += num_accepted
        self._block = None

    monkeypatch.setattr(session_module.TargetSession, "commit", keys_only)
    assert (
        decode(model, prompt, Oracle(prompt + want.tokens, 8, seed=1), max_new=100).tokens
        != want.tokens
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_ends_inside_a_block_and_mask_ids_in_the_text(family):
    model = build(family)
    prompt = random_ids(11)
    free = decode(model, prompt, NoProposer(), max_new=60).tokens
    for eos in (free[10], free[17], free[33]):
        want = decode(model, prompt, NoProposer(), max_new=60, eos=[eos])
        got = decode(
            model, prompt, Oracle(prompt + free, 16, seed=4, wrong=5), max_new=60, eos=[eos]
        )
        assert got.tokens == want.tokens and got.stop_reason == "eos" and got.tokens[-1] == eos
        assert sum(got.emitted) == len(got.tokens) - 1, "a cut round counts what it emitted"
    mask_id = free[5]  # the drafter's mask id occurs in the target's own text and is kept
    shape = shape_for(model, 8)
    drafter = DFlash(type(shape)(**{**shape.__dict__, "mask_token_id": mask_id})).init_weights(0)
    got = decode(model, prompt, DraftProposer(drafter.eval().share(*unembed(model))), max_new=60)
    assert got.tokens == free and mask_id in got.tokens


@pytest.mark.parametrize("max_new", [1, 2, 9])
def test_length_limit_inside_a_round(max_new):
    model = build("qwen3_5")
    prompt = random_ids(1)
    want = decode(model, prompt, NoProposer(), max_new=40).tokens
    got = decode(model, prompt, Oracle(prompt + want, 16, seed=2), max_new=max_new)
    assert got.tokens == want[:max_new] and got.stop_reason == "length"


def test_gdn_steps_match_the_library_and_keep_every_state():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 9, 3, 16).unbind(0)
    v, g, beta = torch.randn(2, 9, 6, 8), -torch.rand(2, 9, 6), torch.rand(2, 9, 6)
    state = torch.randn(2, 6, 16, 8)
    rule = getattr(
        torch_recurrent_gated_delta_rule, "__wrapped__", torch_recurrent_gated_delta_rule
    )
    out, states = gdn_steps(q, k, v, g, beta, state, keep_states=True)
    for n in range(1, 10):
        want, last = rule(
            q[:, :n], k[:, :n], v[:, :n], g=g[:, :n], beta=beta[:, :n], initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(states[n - 1], last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    again = state.clone()
    gdn_steps(q, k, v, g, beta, again, keep_states=False)
    torch.testing.assert_close(again, states[-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_batched_answers_equal_single_ones(family):
    model = build(family)
    prompts = [random_ids(n, seed=n) for n in (3, 17, 9, 26)]
    ends = [AnswerEnd(eos_ids=[7, 8, 9], max_new_tokens=40, loop_ngram=None) for _ in prompts]
    got = generate_batch(model, prompts, ends, pad_id=0)
    for prompt, (ids, reason) in zip(prompts, got, strict=True):
        want = decode(model, prompt, NoProposer(), max_new=40, eos=[7, 8, 9])
        assert (ids, reason) == (want.tokens, want.stop_reason)


def test_a_loop_ends_at_the_first_repeated_ngram():
    end = AnswerEnd(eos_ids=[0], max_new_tokens=100, loop_ngram=3)
    reasons = [end.push(t) for t in [1, 2, 3, 4, 1, 2, 3]]
    assert reasons == [None] * 6 + ["loop"]


def test_lookup_proposes_what_followed_last_time():
    lookup = LookupProposer(3)
    lookup.extend([1, 2, 3, 4, 5, 1, 2, 9, 8, 7], torch.empty(0))
    lookup.extend([1], torch.empty(0))
    assert lookup.propose(2) == [9, 8, 7]
    assert lookup.propose(77) == []
