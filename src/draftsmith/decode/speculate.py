"""The loop: propose, verify, emit what the target agrees with plus its own next token, commit.
One prompt, or a batch of them on chains; a chain is a tree of one path.

The text is the target's own, greedy or sampled, whatever the proposer says; only the number of target
calls changes. (z-lab/dflash dflash/model.py, dflash_generate; docs/hybrids.md says why theirs is not
exact on hybrids.)
"""

import time
from dataclasses import dataclass, field

from torch import Tensor

from draftsmith.decode.batch_session import BatchSession
from draftsmith.decode.ends import AnswerEnd, StopReason
from draftsmith.decode.laps import Laps
from draftsmith.decode.propose import Proposer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.session import TargetSession
from draftsmith.decode.tree import Draft


@dataclass
class Trace:
    """One answer and how it came about. `emitted[r]` tokens came from round r (accepted drafts + 1,
    or fewer when the answer ended inside it); the prefill's token belongs to no round. `accepted[r]`
    drafts were verified, those after the answer's end among them, as servers count.
    `gaps` are the top-2 logit gaps of the target at every token. Of a text that is not the
    autoregressive one, `forced_gaps` says of every token how far its logit lies below the largest in
    one plain forward of the target (0: it is the argmax).
    """

    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason = "length"
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    forced_gaps: list[float] = field(default_factory=list)
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0


@dataclass
class _Answer:
    """One prompt's text as it grows."""

    proposer: Proposer
    end: AnswerEnd
    sampling: Sampling
    trace: Trace = field(default_factory=Trace)
    anchor: int = -1
    reason: StopReason | None = None

    def begin(self, prompt_ids: list[int], logits_V: Tensor, features: Tensor) -> None:
        """The prompt has been read: the first token."""
        self.proposer.extend(prompt_ids, features)
        self.trace.gaps += _gaps(logits_V[None])
        _, self.anchor = self.sampling.decide(Draft([-1], [-1]), logits_V[None])
        self.reason = self.end.push(self.anchor)

    def emit(self, draft: Draft, path: list[int], bonus: int, logits_TV: Tensor) -> None:
        """A round's tokens, up to the answer's end."""
        self.trace.gaps += _gaps(logits_TV[path])
        count = 0
        for token in [*(draft.tokens[node] for node in path[1:]), bonus]:
            self.reason = self.end.push(token)
            count += 1
            if self.reason is not None:
                break
        self.trace.emitted.append(count)
        self.trace.accepted.append(len(path) - 1)
        self.trace.drafted.append(draft.num_drafted)
        self.anchor = bonus

    def done(self, seconds: float, laps: dict[str, float], share: float = 1.0) -> Trace:
        """The trace, with its share of the loop's time."""
        assert self.reason is not None, "the answer has ended"
        self.trace.decode_s = seconds * share
        self.trace.draft_s, self.trace.verify_s, self.trace.commit_s = (
            laps[name] * share for name in ("draft", "verify", "commit")
        )
        self.trace.tokens, self.trace.stop_reason = self.end.tokens, self.reason
        return self.trace


def speculate(
    session: TargetSession,
    prompt_ids: list[int],
    proposer: Proposer,
    end: AnswerEnd,
    sampling: Sampling | None = None,
) -> Trace:
    """Decode until `end` says so; greedily, or as `sampling` says."""
    answer = _Answer(proposer, end, sampling or Sampling())
    logits, features = session.prefill(prompt_ids)
    answer.begin(prompt_ids, logits, features)
    begun, laps = time.perf_counter(), Laps(logits.device)
    while answer.reason is None:
        draft = proposer.propose(answer.anchor)
        laps.mark("draft")
        logits, features = session.verify(draft.tokens, draft.parents)
        path, bonus = answer.sampling.decide(draft, logits)
        laps.mark("verify")
        session.commit(path)
        laps.mark("commit")
        proposer.extend([draft.tokens[node] for node in path], features[path])
        laps.mark("draft")
        answer.emit(draft, path, bonus, logits)
        laps.mark("other")
    return answer.done(time.perf_counter() - begun, laps.seconds())


def speculate_batch(
    session: BatchSession,
    prompts: list[list[int]],
    proposers: list[Proposer],
    ends: list[AnswerEnd],
    samplings: list[Sampling],
) -> list[Trace]:
    """The same of several prompts, each with its own proposer of chains, end and draws; rows that end
    leave the batch. A trace's seconds are the batch's by the rounds that its row took part in.
    """
    rows = zip(proposers, ends, samplings, strict=True)
    answers = [_Answer(proposer, end, sampling) for proposer, end, sampling in rows]
    for answer, ids, read in zip(answers, prompts, session.prefill(prompts), strict=True):
        answer.begin(ids, *read)
    begun, laps = time.perf_counter(), Laps(session.model.device)
    alive = answers
    while True:
        going = [row for row, answer in enumerate(alive) if answer.reason is None]
        if not going:
            break
        if len(going) < len(alive):
            session.keep_rows(going)
            alive = [alive[row] for row in going]
        laps.mark("other")
        drafts = [answer.proposer.propose(answer.anchor) for answer in alive]
        laps.mark("draft")
        read = session.verify([draft.tokens for draft in drafts])
        decided = [
            answer.sampling.decide(draft, logits)
            for answer, draft, (logits, _) in zip(alive, drafts, read, strict=True)
        ]
        laps.mark("verify")
        session.commit([len(path) for path, _ in decided])
        laps.mark("commit")
        for answer, draft, (_, features), (path, _) in zip(
            alive, drafts, read, decided, strict=True
        ):
            answer.proposer.extend(draft.tokens[: len(path)], features[: len(path)])
        laps.mark("draft")
        for answer, draft, (logits, _), chosen in zip(alive, drafts, read, decided, strict=True):
            answer.emit(draft, *chosen, logits)
    seconds, took = time.perf_counter() - begun, laps.seconds()
    rounds = max(1, sum(len(answer.trace.emitted) for answer in answers))
    return [answer.done(seconds, took, len(answer.trace.emitted) / rounds) for answer in answers]


def _gaps(logits_TV: Tensor) -> list[float]:
    top = logits_TV.topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()
