"""The loop: propose, verify, emit what the target agrees with plus its own next token, commit.
Greedy, one prompt; a chain is a tree of one path.

The text is the target's own greedy text whatever the proposer says; only the number of target calls
changes. (z-lab/dflash dflash/model.py, dflash_generate; docs/hybrids.md says why theirs is not
exact on hybrids.)
"""

import time
from dataclasses import dataclass, field

from torch import Tensor

from draftsmith.decode.ends import AnswerEnd, StopReason
from draftsmith.decode.propose import Proposer
from draftsmith.decode.session import TargetSession


@dataclass
class Trace:
    """One answer and how it came about. `emitted[r]` tokens came from round r (accepted drafts + 1,
    or fewer when the answer ended inside it); the prefill's token belongs to no round. `accepted[r]`
    drafts were verified, those after the answer's end among them, as servers count.
    `gaps` are the top-2 logit gaps of the target at every token.
    """

    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason = "length"
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    decode_s: float = 0.0


def speculate(
    session: TargetSession,
    prompt_ids: list[int],
    proposer: Proposer,
    end: AnswerEnd,
) -> Trace:
    """Decode until `end` says so."""
    trace = Trace()
    logits, features = session.prefill(prompt_ids)
    proposer.extend(prompt_ids, features)
    trace.gaps += _gaps(logits[None])
    anchor = int(logits.argmax())
    reason = end.push(anchor)
    begun = time.perf_counter()
    while reason is None:
        draft = proposer.propose(anchor)
        logits, features = session.verify(draft.tokens, draft.parents)
        choices = logits.argmax(-1).tolist()
        path = draft.walk(choices)
        session.commit(path)
        proposer.extend([draft.tokens[node] for node in path], features[path])
        trace.gaps += _gaps(logits[path])
        count = 0
        for token in (choices[node] for node in path):  # an accepted draft is its parent's choice
            reason = end.push(token)
            count += 1
            if reason is not None:
                break
        trace.emitted.append(count)
        trace.accepted.append(len(path) - 1)
        trace.drafted.append(draft.num_drafted)
        anchor = choices[path[-1]]
    trace.decode_s = time.perf_counter() - begun
    trace.tokens, trace.stop_reason = end.tokens, reason
    return trace


def _gaps(logits_TV: Tensor) -> list[float]:
    top = logits_TV.topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()
