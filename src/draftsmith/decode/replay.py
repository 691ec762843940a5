"""Acceptance without a decode loop: the drafter along a text that the target has already written."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decode.propose import DraftProposer
from draftsmith.decode.tree import Draft
from draftsmith.drafter.model import DFlash


@dataclass
class Replay:
    """Rounds along one text: tokens emitted and drafts accepted in each, as in a Trace."""

    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


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
    the target's features of it. Drafts beyond the text's end count as rejected.
    """
    assert len(features_nKH) >= len(ids) - 1, "features of every token but the last"
    proposer, out = DraftProposer(drafter, tree_budget=tree_budget), Replay()
    proposer.extend(ids[:num_prompt], features_nKH[:num_prompt])
    anchor = num_prompt  # emitted by the prefill, not committed
    while anchor < len(ids) - 1:
        draft = proposer.propose(ids[anchor])
        accepted = _along(draft, ids[anchor + 1 :])
        count = min(accepted + 1, len(ids) - 1 - anchor)
        span = slice(anchor, anchor + count)
        proposer.extend(ids[span], features_nKH[span])
        anchor += count
        out.emitted.append(count)
        out.accepted.append(accepted)
    return out


def _along(draft: Draft, text: list[int]) -> int:
    """Drafts that the text passes through."""
    node = 0
    for depth, token in enumerate(text):
        child = next(
            (i for i in range(node + 1, len(draft.tokens))
             if draft.parents[i] == node and draft.tokens[i] == token), None,
        )  # fmt: skip
        if child is None:
            return depth
        node = child
    return len(text)
