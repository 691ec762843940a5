"""Speculative decoding is exact: the text of the autoregressive loop, whatever the proposer, on every family."""

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.decode import session as session_module
from draftsmith.decode.batch import generate_batch
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.gdn import Block, conv_steps, conv_tree, gdn_block, gdn_step
from draftsmith.decode.propose import DraftProposer, LookupProposer, NoProposer
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import Trace, speculate
from draftsmith.decode.tree import Draft, best_first, chain
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
        return chain(anchor_id, drafts)


class TreeOracle(Oracle):
    """A random tree that holds the true continuation down to a random depth, among wrong branches."""

    def propose(self, anchor_id):
        spine = super().propose(anchor_id).tokens[1:]
        tokens, parents, tip = [anchor_id], [-1], 0
        for token in spine:
            for _ in range(int(torch.randint(0, 3, (), generator=self.random))):
                parent = int(torch.randint(0, len(tokens), (), generator=self.random))
                wrong = int(torch.randint(3, VOCAB, (), generator=self.random))
                children = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
                true_here = token if parent == tip else None
                if wrong not in children and wrong != true_here:
                    tokens.append(wrong)
                    parents.append(parent)
            tokens.append(token)
            parents.append(tip)
            tip = len(tokens) - 1
        return Draft(tokens, parents)


def decode(model, prompt, proposer, *, max_new=200, eos=()) -> Trace:
    end = AnswerEnd(eos_ids=list(eos), max_new_tokens=max_new, loop_ngram=None)
    return speculate(TargetSession(model, TAPS), prompt, proposer, end)


@cache
def written(
    family: str, dtype: torch.dtype = torch.float32, prompt: int = 11, tokens: int = 220
) -> tuple[PreTrainedModel, list[int], list[int]]:
    """A model, a prompt of so many tokens, and what the autoregressive loop writes after it."""
    model, ids = build(family, dtype), random_ids(prompt)
    return model, ids, decode(model, ids, NoProposer(), max_new=tokens).tokens


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
    model, prompt, want = written(family, dtype)
    assert len(want) == 220
    assert len(set(want)) > 20, "the random target must not be stuck on one token"
    for block in (2, 5, 16):
        got = decode(model, prompt, Oracle(prompt + want, block, seed=block), max_new=220)
        assert got.tokens == want
        assert len(set(got.accepted)) >= min(block, 7), "rollbacks of many depths"


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "bamba"])
def test_drafter_lookup_and_autoregressive_agree(family):
    model = build(family)
    drafter = DFlash(shape_for(model, 8)).init_weights(3).eval().share(*unembed(model))
    for seed in range(2):
        prompt = random_ids(30, seed)
        want = decode(model, prompt, NoProposer(), max_new=50)
        for proposer in (
            DraftProposer(drafter),
            LookupProposer(7),
            Oracle(prompt + want.tokens, 8, seed),
        ):
            assert decode(model, prompt, proposer, max_new=50).tokens == want.tokens


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_committed_state_is_the_autoregressive_state(family, tree):
    model, prompt, want = written(family, torch.float64, prompt=9, tokens=60)
    sessions = [TargetSession(model, TAPS) for _ in range(2)]
    for session in sessions:
        session.prefill(prompt)
    for token in want[:50]:
        sessions[0].verify([token])
        sessions[0].commit([0])
    oracle, at = (TreeOracle if tree else Oracle)(prompt + want, 6, seed=0), 0
    oracle.at = len(prompt)
    while at < 50:
        draft = oracle.propose(want[at])
        sessions[1].verify(draft.tokens, draft.parents)
        path = [0]
        while len(path) < 50 - at:
            node = next(
                (i for i, (t, p) in enumerate(zip(draft.tokens, draft.parents, strict=True))
                 if p == path[-1] and t == want[at + len(path)]), None,
            )  # fmt: skip
            if node is None:
                break
            path.append(node)
        sessions[1].commit(path)
        oracle.at, at = oracle.at + len(path), at + len(path)
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
    model, prompt, want = written(family)

    @torch.inference_mode()
    def keys_only(self, path):
        size = len(self._block.parents)
        self._keep_keys(size, path)
        self._keep_convolutions(size, path)
        for layer, stash in zip(self._linear_layers(), self._block.stashes, strict=False):
            stash.fold(layer.recurrent_states[0], torch.arange(size))
        self.num_committed += len(path)
        self._block = None

    monkeypatch.setattr(session_module.TargetSession, "commit", keys_only)
    assert decode(model, prompt, Oracle(prompt + want, 8, seed=1), max_new=60).tokens != want[:60]


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_ends_inside_a_block_and_mask_ids_in_the_text(family):
    model, prompt, free = written(family)
    free = free[:60]
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


def gdn_inputs(T: int, dtype=torch.float64, seed=0):
    """q, k, v, g, beta and a state: 2 rows, 3 key heads, 6 value heads."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, T, 3, 16, generator=generator, dtype=dtype).unbind(0)
    v = torch.randn(2, T, 6, 8, generator=generator, dtype=dtype)
    g = -3 * torch.rand(2, T, 6, generator=generator, dtype=dtype)
    beta = torch.rand(2, T, 6, generator=generator, dtype=dtype)
    return (q, k, v, g, beta), torch.randn(2, 6, 16, 8, generator=generator, dtype=dtype)


def random_parents(T: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, T)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_one_step_is_the_librarys():
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_recurrent_gated_delta_rule as rule,
    )

    inputs, state = gdn_inputs(9, torch.float32)
    rule = getattr(rule, "__wrapped__", rule)
    q, k, v, g, beta = inputs
    want, last = rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    mine = state.clone()
    out = [gdn_step(*(x[:, t : t + 1] for x in inputs), mine) for t in range(9)]
    torch.testing.assert_close(torch.cat(out, 1), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_block_is_its_paths_one_by_one(dtype, bound, seed):
    """Outputs of a chain or tree, and the state folded over every path, against single steps."""
    T = 24
    parents = list(range(-1, T - 1)) if seed is None else random_parents(T, seed)
    inputs, state = gdn_inputs(T, dtype)
    out, stash = gdn_block(*inputs, state, Block.of(parents, torch.device("cpu")).seen)
    for node in range(T):
        mine, path = state.clone(), path_to(node, parents)
        for t in path:
            want = gdn_step(*(x[:, t : t + 1] for x in inputs), mine)
        torch.testing.assert_close(out[:, node : node + 1], want, rtol=0, atol=bound)
        folded = state.clone()
        stash.fold(folded, torch.tensor(path))
        torch.testing.assert_close(folded, mine, rtol=0, atol=bound)


@pytest.mark.parametrize("history", [0, 2, 7])
def test_convolutions_walk_ancestors(history):
    parents, weight = random_parents(15, 5), torch.randn(6, 4)
    x = torch.randn(1, 6, history + 15)
    got = conv_tree(x, weight, None, "silu", Block.of(parents, torch.device("cpu")))
    for node in range(15):
        columns = [*range(history), *(history + n for n in path_to(node, parents))]
        want = conv_steps(x[..., columns], weight, None, "silu")[..., -1]
        torch.testing.assert_close(got[..., history + node], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe", "gemma3", "gpt_oss"])
def test_trees_leave_the_autoregressive_text(family, dtype):
    model, prompt, want = written(family, dtype)
    for seed, block in ((1, 4), (2, 9)):
        got = decode(model, prompt, TreeOracle(prompt + want, block, seed), max_new=150)
        assert got.tokens == want[:150]
        assert len(set(got.accepted)) >= 3 and max(got.drafted) > max(got.accepted)


@pytest.mark.parametrize("budget", [1, 7, 28])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafters_trees_leave_the_autoregressive_text(family, budget):
    model, prompt, want = written(family, torch.float64, prompt=21, tokens=60)
    drafter = DFlash(shape_for(model, 8)).init_weights(3).double().eval().share(*unembed(model))
    got = decode(model, prompt, DraftProposer(drafter, tree_budget=budget), max_new=60)
    assert got.tokens == want and set(got.drafted) == {budget}


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_each_nodes_logits_are_its_paths(family):
    """Without an oracle: a node of the tree is the last token of its path run as a chain."""
    model = build(family, torch.float64)
    prompt, T = random_ids(40), 17
    tokens, parents = random_ids(T, 4), random_parents(T, 4)
    session = TargetSession(model, TAPS)
    session.prefill(prompt)
    logits, features = session.verify(tokens, parents)
    for node in range(T):
        alone = TargetSession(model, TAPS)
        alone.prefill(prompt)
        path = path_to(node, parents)
        want, its = alone.verify([tokens[n] for n in path])
        torch.testing.assert_close(logits[node], want[-1], rtol=0, atol=2e-5)
        torch.testing.assert_close(features[node], its[-1], rtol=0, atol=2e-5)


def brute_force(logits: torch.Tensor, budget: int) -> list[tuple[int, ...]]:
    """The most probable prefixes, by enumerating all of them."""
    import itertools

    lp = logits.log_softmax(-1)
    L, V = logits.shape
    every = [
        (float(sum(lp[d, t] for d, t in enumerate(prefix))), prefix)
        for depth in range(1, L + 1)
        for prefix in itertools.product(range(V), repeat=depth)
    ]
    return [prefix for _, prefix in sorted(every, reverse=True)[:budget]]


def prefixes(draft: Draft) -> list[tuple[int, ...]]:
    return [
        tuple(draft.tokens[n] for n in path_to(node, draft.parents)[1:])
        for node in range(1, len(draft.tokens))
    ]


@pytest.mark.parametrize("seed", range(6))
def test_trees_hold_the_most_probable_prefixes_best_first(seed):
    logits = 2 * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    for budget in (1, 3, 4, 12, 40):
        plain = best_first(9, logits, budget, chain_first=False)
        if budget <= 5:  # top-k cuts each slot to the budget: beyond V nothing is cut
            assert prefixes(plain) == brute_force(logits, budget)
        assert set(prefixes(plain)) == set(brute_force(logits, budget))
        seeded = best_first(9, logits, budget)
        spine = tuple(logits.argmax(-1).tolist())
        assert prefixes(seeded)[: min(3, budget)] == [spine[: d + 1] for d in range(min(3, budget))]
        assert len(set(prefixes(seeded))) == seeded.num_drafted == budget
        if budget >= 3:  # beside the spine, the most probable of what is left
            rest = [p for p in brute_force(logits, 200) if p not in prefixes(seeded)[:3]]
            kept = set(prefixes(seeded)[3:])
            assert kept == set(rest[: budget - 3])


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
    assert lookup.propose(2).tokens == [2, 9, 8, 7]
    assert lookup.propose(77).tokens == [77]
