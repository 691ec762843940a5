"""The loop: propose, verify, emit what the target agrees with plus its own next token, commit.
One prompt; a chain is a tree of one path.

The text is the target's own, greedy or sampled, whatever the proposer says; only the number of target
calls changes. (z-lab/dflash dflash/model.py, dflash_generate; docs/hybrids.md says why theirs is not
exact on hybrids.)
"""

import time
from dataclasses import dataclass, field

from torch import Tensor

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


def speculate(
    session: TargetSession,
    prompt_ids: list[int],
    proposer: Proposer,
    end: AnswerEnd,
    sampling: Sampling | None = None,
) -> Trace:
    """Decode until `end` says so; greedily, or as `sampling` says."""
    trace, sampling = Trace(), sampling or Sampling()
    logits, features = session.prefill(prompt_ids)
    proposer.extend(prompt_ids, features)
    trace.gaps += _gaps(logits[None])
    _, anchor = sampling.decide(Draft([-1], [-1]), logits[None])
    reason = end.push(anchor)
    begun, laps = time.perf_counter(), Laps(logits.device)
    while reason is None:
        draft = proposer.propose(anchor)
        laps.mark("draft")
        logits, features = session.verify(draft.tokens, draft.parents)
        path, bonus = sampling.decide(draft, logits)
        laps.mark("verify")
        session.commit(path)
        laps.mark("commit")
        proposer.extend([draft.tokens[node] for node in path], features[path])
        laps.mark("draft")
        trace.gaps += _gaps(logits[path])
        count = 0
        for token in [*(draft.tokens[node] for node in path[1:]), bonus]:
            reason = end.push(token)
            count += 1
            if reason is not None:
                break
        trace.emitted.append(count)
        trace.accepted.append(len(path) - 1)
        trace.drafted.append(draft.num_drafted)
        anchor = bonus
        laps.mark("other")
    trace.decode_s, took = time.perf_counter() - begun, laps.seconds()
    trace.draft_s, trace.verify_s, trace.commit_s = (
        took[name] for name in ("draft", "verify", "commit")
    )
    trace.tokens, trace.stop_reason = end.tokens, reason
    return trace


def _gaps(logits_TV: Tensor) -> list[float]:
    top = logits_TV.topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()
