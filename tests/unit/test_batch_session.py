"""A batch is its prompts one by one: texts, rounds, draws and caches, on every family that can be batched."""

import pytest
import torch
from test_decode import FAMILIES, TAPS, Oracle, decode, shape_for

from draftsmith.core import UserError
from draftsmith.decode.batch_session import BatchSession
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.propose import DraftProposer, NoProposer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import speculate, speculate_batch
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import unembed
from tiny_models import build, random_ids

LENGTHS = (1, 23, 9, 40)
MORE = ["qwen3_5_moe", "llama", "gemma3", "qwen2", "qwen3_moe", "gemma4", "gpt_oss"]


class Poor(Oracle):
    """Right for at most two of its many drafts: a cache full of holes."""

    def propose(self, anchor_id):
        draft = super().propose(anchor_id)
        for slot in range(3, len(draft.tokens)):
            draft.tokens[slot] = 3
        return draft


def ends(limits, eos) -> list[AnswerEnd]:
    return [
        AnswerEnd(eos_ids=[token] if token else [], max_new_tokens=limit, loop_ngram=None)
        for limit, token in zip(limits, eos, strict=True)
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_texts_and_rounds_are_those_of_single_prompts(family, monkeypatch):
    """Rows of other lengths, blocks and ends: an end token inside a block, limits inside rounds."""
    model, prompts = build(family, torch.float64), [random_ids(n, seed=n) for n in LENGTHS]
    texts = [decode(model, ids, NoProposer(), max_new=48).tokens for ids in prompts]
    limits, eos = (48, 48, 2, 48), (None, texts[1][25], None, None)
    closed = []
    close = BatchSession._close_holes
    monkeypatch.setattr(
        BatchSession, "_close_holes", lambda self: (close(self), closed.append(len(self.lengths)))
    )

    def proposers(kind):
        if kind == "ar":
            return [NoProposer() for _ in prompts]
        kinds = zip(prompts, texts, (Poor, Oracle, Oracle, Oracle), (16, 12, 12, 5), strict=True)
        return [its(ids + text, block, seed=block) for ids, text, its, block in kinds]

    for kind in ("ar", "chain"):
        want = [
            speculate(TargetSession(model, TAPS), ids, proposer, end)
            for ids, proposer, end in zip(prompts, proposers(kind), ends(limits, eos), strict=True)
        ]
        session, greedy = BatchSession(model, TAPS), [Sampling() for _ in prompts]
        got = speculate_batch(session, prompts, proposers(kind), ends(limits, eos), greedy)
        for mine, its in zip(got, want, strict=True):
            assert mine.tokens == its.tokens and mine.stop_reason == its.stop_reason
            assert mine.emitted == its.emitted and mine.accepted == its.accepted
            assert mine.drafted == its.drafted and len(mine.gaps) == len(its.gaps)
        assert got[1].stop_reason == "eos" and len(got[2].tokens) == 2
        assert session.num_calls == len(prompts) + max(len(t.emitted) for t in want)
    assert len(set(got[1].accepted) | set(got[3].accepted)) >= 5 and len(got[1].tokens) < 30
    assert closed, "holes were closed"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rows_cache_is_its_own(family):
    model = build(family, torch.float64)
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    texts = [decode(model, ids, NoProposer(), max_new=70).tokens for ids in prompts]
    oracles = [
        (Poor if row == 0 else Oracle)(ids + text, 8, seed=row)
        for row, (ids, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    session = BatchSession(model, TAPS)
    read = session.prefill(prompts)
    features = [[its] for _, its in read]
    for oracle, ids in zip(oracles, prompts, strict=True):
        oracle.extend(ids, None)
    rows = list(range(len(prompts)))
    for turn in range(9):
        if turn == 6:
            rows.remove(1)
            session.keep_rows([0, 2, 3])
        at = [session.lengths[i] - len(prompts[row]) for i, row in enumerate(rows)]
        drafts = [
            oracles[row].propose(texts[row][a]).tokens for row, a in zip(rows, at, strict=True)
        ]
        counts = []
        for row, a, draft in zip(rows, at, drafts, strict=True):
            right = [t == w for t, w in zip(draft, texts[row][a:], strict=False)]
            counts.append((right + [False]).index(False))
        for row, count, (_, its) in zip(rows, counts, session.verify(drafts), strict=True):
            features[row].append(its[:count])
        session.commit(counts)
        for row, count, draft in zip(rows, counts, drafts, strict=True):
            oracles[row].extend(draft[:count], None)
    for i, row in enumerate(rows):
        alone = TargetSession(model, TAPS)
        _, its = alone.prefill(prompts[row])
        want = [its]
        for token in texts[row][: session.lengths[i] - len(prompts[row])]:
            want.append(alone.verify([token])[1])
            alone.commit([0])
        close = {"rtol": 1e-6, "atol": 1e-6}  # the library's prefill rounds to fp32
        torch.testing.assert_close(torch.cat(features[row]), torch.cat(want), **close)
        kept = session.kept_Bn[i]
        assert session.positions_Bn[i][kept].tolist() == list(range(alone.num_committed))
        for mine, ours in zip(session.cache.layers, alone.cache.layers, strict=True):
            if hasattr(ours, "recurrent_states"):
                for name in ("recurrent_states", "conv_states"):
                    a, b = getattr(mine, name)[0][i], getattr(ours, name)[0][0]
                    torch.testing.assert_close(a, b, **close)
            else:
                torch.testing.assert_close(mine.keys[i][:, kept], ours.keys[0], **close)
                torch.testing.assert_close(mine.values[i][:, kept], ours.values[0], **close)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_rows_draws_are_its_own(family):
    """Sampled chains, drawn from the drafter: a row's text is that of the prompt alone, whatever the others."""
    model = build(family, torch.float64)
    drafter = DFlash(shape_for(model, 6)).init_weights(3).double().eval().share(*unembed(model))

    def rows(seeds):
        samplings = [Sampling(1.5, 0.95, 40, seed=seed) for seed in seeds]
        return [DraftProposer(drafter, sampling=s) for s in samplings], samplings

    def prompt(seed):
        return random_ids(5 + seed, seed=seed)

    alone = {}
    for seed in range(6):
        (proposer,), (sampling,) = rows([seed])
        end = AnswerEnd(eos_ids=[7], max_new_tokens=40, loop_ngram=None)
        alone[seed] = speculate(TargetSession(model, TAPS), prompt(seed), proposer, end, sampling)
    for seeds in ([0, 1, 2, 3], [3, 5, 0], [4, 3]):
        proposers, samplings = rows(seeds)
        its_ends = ends([40] * len(seeds), [7] * len(seeds))
        got = speculate_batch(
            BatchSession(model, TAPS), [prompt(s) for s in seeds], proposers, its_ends, samplings
        )
        for seed, trace in zip(seeds, got, strict=True):
            assert trace.tokens == alone[seed].tokens and trace.accepted == alone[seed].accepted
    texts = {tuple(trace.tokens) for trace in alone.values()}
    assert len(texts) == 6 and sum(sum(t.accepted) for t in alone.values()) > 0


def test_a_family_that_cannot_be_batched_is_refused():
    model = build("bamba")
    with pytest.raises(UserError, match="evaluate.batch: 1"):
        BatchSession(model, []).prefill([[5, 6], [7]])
