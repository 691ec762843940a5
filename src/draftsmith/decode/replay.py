"""Acceptance without a decode loop: the drafter along a text that the target has already written."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decode.propose import DraftProposer, Proposer
from draftsmith.decode.tree import Draft
from draftsmith.drafter.model import DFlash

NO_TOKEN = -1


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
    return replay_of(DraftProposer(drafter, tree_budget=tree_budget), ids, num_prompt, features_nKH)


def replay_of(proposer: Proposer, ids: list[int], num_prompt: int, features_nKH: Tensor) -> Replay:
    """The same of any proposer that has seen nothing yet."""
    assert len(features_nKH) >= len(ids) - 1, "features of every token but the last"
    out = Replay()
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
    """Drafts that the text passes through: the walk of a target that writes this text at every depth."""
    depths = [0]
    for parent in draft.parents[1:]:
        depths.append(depths[parent] + 1)
    return len(draft.walk([text[d] if d < len(text) else NO_TOKEN for d in depths])) - 1
