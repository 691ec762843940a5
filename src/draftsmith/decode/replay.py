"""Acceptance without a decode loop: the drafter along a text that the target has already written.

A draft sees nothing but the text before its anchor, so the drafts at many anchors are made in one
forward, and the walk then advances by accepted + 1 as the loop would. Trees are built only where the
walk stands.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decode.propose import Proposer
from draftsmith.decode.tree import Draft, best_first
from draftsmith.drafter.model import ContextCache, DFlash

NO_TOKEN = -1
TOGETHER = 512  # block positions a forward; of a 248k vocabulary 240 MB of logits in bf16


@dataclass
class Replay:
    """Rounds along one text: tokens emitted and drafts accepted in each, as in a Trace."""

    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def walk(accepted_at: Callable[[int], int], first: int, end: int) -> Replay:
    """The rounds of a text whose tokens [first, end) are the answer: token `first` comes from the
    prefill; `accepted_at(i)` drafts are right after token i.
    """
    out, anchor = Replay(), first
    while anchor < end - 1:
        accepted = accepted_at(anchor)
        out.accepted.append(accepted)
        out.emitted.append(min(accepted + 1, end - 1 - anchor))
        anchor += out.emitted[-1]
    return out


@torch.inference_mode()
def replay(
    drafter: DFlash,
    ids: list[int],
    num_prompt: int,
    features_nKH: Tensor,
    *,
    tree_budget: int | None = None,
) -> Replay:
    """What greedy decoding would have accepted on the greedy text `ids` (prompt, then answer), given
    the target's features of it: the argmax chain, or trees of so many nodes. Drafts beyond the text's
    end count as rejected.
    """
    assert len(features_nKH) >= len(ids) - 1, "features of every token but the last"
    cache = ContextCache(drafter)
    cache.append(features_nKH[: len(ids) - 1])
    many = max(1, TOGETHER // drafter.shape.block_size)
    begin = num_prompt  # the anchors [begin, begin + many) are drafted at
    chains: list[int] = []
    logits = features_nKH.new_empty(0)

    def accepted_at(anchor: int) -> int:
        nonlocal begin, logits, chains
        if not len(logits) or anchor >= begin + len(logits):
            begin = anchor
            anchors = ids[begin : min(begin + many, len(ids) - 1)]
            logits = drafter.slots_at(anchors, begin, cache)
            chains = [] if tree_budget else _chains(logits, ids, begin)
        if not tree_budget:
            return chains[anchor - begin]
        return _along(
            best_first(ids[anchor], logits[anchor - begin], tree_budget), ids[anchor + 1 :]
        )

    return walk(accepted_at, num_prompt, len(ids))


def replay_of(proposer: Proposer, ids: list[int], num_prompt: int, features_nKH: Tensor) -> Replay:
    """The same of any proposer that has seen nothing yet, round by round."""
    assert len(features_nKH) >= len(ids) - 1, "features of every token but the last"
    proposer.extend(ids[:num_prompt], features_nKH[:num_prompt])
    seen = num_prompt

    def accepted_at(anchor: int) -> int:
        nonlocal seen
        if anchor > seen:
            proposer.extend(ids[seen:anchor], features_nKH[seen:anchor])
            seen = anchor
        return _along(proposer.propose(ids[anchor]), ids[anchor + 1 :])

    return walk(accepted_at, num_prompt, len(ids))


def _chains(logits_ALV: Tensor, ids: list[int], begin: int) -> list[int]:
    """Leading drafts of the argmax chain that are the text's, at each anchor."""
    A, L, _ = logits_ALV.shape
    text = [*ids[begin + 1 : begin + A + L], *[NO_TOKEN] * L][: A + L - 1]
    want_AL = torch.tensor(text, device=logits_ALV.device).unfold(0, L, 1)
    return (logits_ALV.argmax(-1) == want_AL).long().cumprod(-1).sum(-1).tolist()


def _along(draft: Draft, text: list[int]) -> int:
    """Drafts that the text passes through: the walk of a target that writes this text at every depth."""
    depths = [0]
    for parent in draft.parents[1:]:
        depths.append(depths[parent] + 1)
    return len(draft.walk([text[d] if d < len(text) else NO_TOKEN for d in depths])) - 1
