"""Sampled chains and trees keep the target's joint distribution: chi-square on small vocabularies,
through the real loop, with a target that is a table; and a broken verifier that is caught.
"""

from collections import Counter

import numpy as np
import pytest
import torch

from draftsmith.decode import sampling as sampling_module
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.propose import NoProposer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.speculate import speculate
from draftsmith.decode.tree import best_first, chain

V, LENGTH, RUNS = 8, 3, 2000
PROMPT = [0]
RANDOM = torch.Generator().manual_seed(1)
BASE = 1.2 * torch.randn(V, generator=RANDOM)
TABLE = BASE + 0.8 * torch.randn(V, V, V, generator=RANDOM)
GUESS = BASE + 0.3 * torch.randn(4, V, generator=RANDOM)


class TableTarget:
    """A target whose logits depend on the last two tokens; the session's interface."""

    def prefill(self, ids):
        self.text = list(ids)
        return self._logits(self.text), torch.zeros(len(ids), 0)

    def verify(self, tokens, parents):
        self.tokens, rows, lines = tokens, [], []
        for token, parent in zip(tokens, parents, strict=True):
            lines.append([*(lines[parent] if parent >= 0 else self.text), token])
            rows.append(self._logits(lines[-1]))
        return torch.stack(rows), torch.zeros(len(tokens), 0)

    def commit(self, path):
        self.text += [self.tokens[node] for node in path]

    def _logits(self, text):
        return TABLE[text[-2] if len(text) > 1 else 0, text[-1]]


class TableDrafter:
    """Draws chains from a fixed guess, or makes its tree."""

    def __init__(self, sampling, kind):
        self.sampling, self.kind = sampling, kind

    def extend(self, token_ids, features):
        pass

    def propose(self, anchor_id):
        if self.kind == "tree":
            return best_first(anchor_id, GUESS, 9)
        if self.kind == "argmax chain":
            return chain(anchor_id, GUESS.argmax(-1).tolist())
        q = self.sampling.probabilities(GUESS)
        return chain(anchor_id, self.sampling.draw(q), q)


def joint(options: dict) -> np.ndarray:
    """The exact distribution of the first LENGTH tokens, flattened."""
    sampling = Sampling(**options)
    out = np.zeros((V,) * LENGTH)
    for index in np.ndindex(*out.shape):
        text, p = list(PROMPT), 1.0
        for token in index:
            target = TableTarget()
            p *= float(sampling.probabilities(target._logits(text)[None])[0, token])
            text.append(token)
        out[index] = p
    return out.ravel()


def counts(kind: str, options: dict) -> tuple[np.ndarray, float]:
    """How often each text came, and tau."""
    seen: Counter[tuple[int, ...]] = Counter()
    tokens = rounds = 0
    sampling = Sampling(**options)
    for _ in range(RUNS):
        end = AnswerEnd(eos_ids=[], max_new_tokens=LENGTH, loop_ngram=None)
        proposer = NoProposer() if kind == "ar" else TableDrafter(sampling, kind)
        trace = speculate(TableTarget(), PROMPT, proposer, end, sampling)
        seen[tuple(trace.tokens)] += 1
        tokens, rounds = tokens + sum(trace.emitted), rounds + len(trace.emitted)
    return np.array([seen[i] for i in np.ndindex(*(V,) * LENGTH)]), tokens / rounds


def chi_square(observed: np.ndarray, p: np.ndarray) -> float:
    """Standard deviations above the expected chi-square; cells under 5 expected are pooled."""
    expected = p * observed.sum()
    small = expected < 5
    o = np.append(observed[~small], observed[small].sum())
    e = np.append(expected[~small], expected[small].sum())
    o, e = o[e > 0], e[e > 0]
    assert observed[p == 0].sum() == 0, "a text that the target can never write"
    freedom = len(e) - 1
    return (float(((o - e) ** 2 / e).sum()) - freedom) / (2 * freedom) ** 0.5


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 4},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["chain", "argmax chain", "tree"])
def test_sampled_texts_have_the_targets_joint_distribution(kind, options):
    observed, tau = counts(kind, {**options, "seed": 3})
    assert tau > 1.05, "drafts must be accepted, or nothing is tested"
    assert chi_square(observed, joint(options)) < 4


def test_a_broken_verifier_is_caught(monkeypatch):
    """Replacing a rejected draft by a draw from p, not from max(p - q, 0), is the classic mistake."""

    def broken(self, drafts, q_LV, p_TV):
        for slot, (token, u) in enumerate(zip(drafts, self.uniform(len(drafts)), strict=True)):
            if u * float(q_LV[slot, token]) >= float(p_TV[slot, token]):
                return list(range(slot + 1)), self.draw(p_TV[slot][None])[0]
        return list(range(len(drafts) + 1)), self.draw(p_TV[len(drafts)][None])[0]

    monkeypatch.setattr(sampling_module.Sampling, "_reject", broken)
    observed, _ = counts("chain", {"temperature": 1.0, "seed": 3})
    assert chi_square(observed, joint({"temperature": 1.0})) > 8


def test_a_chain_that_is_taken_for_granted_is_caught(monkeypatch):
    """So is keeping every draft."""
    monkeypatch.setattr(sampling_module.Sampling, "uniform", lambda self, count: [0.0] * count)
    observed, _ = counts("chain", {"temperature": 1.0, "seed": 3})
    assert chi_square(observed, joint({"temperature": 1.0})) > 8


def test_probabilities_are_cut_and_renormalised():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert torch.allclose(
        Sampling(1.0, top_k=2).probabilities(logits)[0], torch.tensor([0.625, 0.375, 0, 0]).double()
    )
    cut = Sampling(1.0, top_p=0.7).probabilities(logits)[0]
    assert torch.allclose(cut, torch.tensor([0.625, 0.375, 0, 0]).double())
    assert (Sampling(1.0, top_p=0.4).probabilities(logits)[0] > 0).tolist() == [
        True,
        False,
        False,
        False,
    ]
    hot = Sampling(0.5).probabilities(logits)[0]
    assert torch.allclose(hot, logits.double().mul(2).softmax(-1)[0])


def test_greedy_is_temperature_zero():
    end = AnswerEnd(eos_ids=[], max_new_tokens=20, loop_ngram=None)
    want = speculate(TableTarget(), PROMPT, NoProposer(), end).tokens
    sampling = Sampling()
    for kind in ("argmax chain", "tree"):
        end = AnswerEnd(eos_ids=[], max_new_tokens=20, loop_ngram=None)
        assert (
            speculate(TableTarget(), PROMPT, TableDrafter(sampling, kind), end, sampling).tokens
            == want
        )
