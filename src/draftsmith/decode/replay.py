"""Acceptance without a decode loop: the drafter along a text that the target has already written."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decode.speculate import leading_matches
from draftsmith.drafter.model import ContextCache, DFlash


@dataclass
class Replay:
    """Rounds along one text: tokens emitted and drafts accepted in each, as in a Trace."""

    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@torch.inference_mode()
def replay(drafter: DFlash, ids: list[int], num_prompt: int, features_nKH: Tensor) -> Replay:
    """What greedy decoding would have accepted on the greedy text `ids` (prompt, then answer), given
    the target's features of it. Drafts beyond the text's end count as rejected.
    """
    assert len(features_nKH) >= len(ids) - 1, "features of every token but the last"
    cache, out = ContextCache(drafter), Replay()
    cache.append(features_nKH[:num_prompt])
    anchor = num_prompt  # emitted by the prefill, not committed
    while anchor < len(ids) - 1:
        drafts = drafter.draft(ids[anchor], cache)
        accepted = leading_matches(drafts, ids[anchor + 1 :])
        count = min(accepted + 1, len(ids) - 1 - anchor)
        cache.append(features_nKH[anchor : anchor + count])
        anchor += count
        out.emitted.append(count)
        out.accepted.append(accepted)
    return out
