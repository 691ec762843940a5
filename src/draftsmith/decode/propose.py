"""Who proposes the next tokens: the DFlash drafter, a look into the text so far, or nobody
(autoregressive).
"""

from typing import Protocol

import torch
from torch import Tensor

from draftsmith.decode.sampling import Sampling
from draftsmith.decode.tree import Draft, best_first, chain
from draftsmith.drafter.model import ContextCache, DFlash


class Proposer(Protocol):
    """Sees the committed text with its features, proposes tokens to follow the anchor."""

    def extend(self, token_ids: list[int], features: Tensor) -> None:
        """Committed tokens and their features [T, taps, H]: the prompt first, then each round's
        accepted ones.
        """

    def propose(self, anchor_id: int) -> Draft:
        """Tokens to follow the anchor, which is emitted but not yet committed: a chain or a tree."""
        ...


class NoProposer:
    """Autoregressive decoding in the same loop."""

    def extend(self, token_ids: list[int], features: Tensor) -> None:
        pass

    def propose(self, anchor_id: int) -> Draft:
        return chain(anchor_id, [])


class LookupProposer:
    """Prompt lookup: what followed the latest earlier occurrence of the last n tokens, the longest
    n first.
    """

    def __init__(self, num_tokens: int, max_ngram: int = 3) -> None:
        self._count, self._max, self._text = num_tokens, max_ngram, []

    def extend(self, token_ids: list[int], features: Tensor) -> None:
        self._text += token_ids

    def propose(self, anchor_id: int) -> Draft:
        text = [*self._text, anchor_id]
        for n in range(min(self._max, len(text) - 1), 0, -1):
            tail = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == tail:
                    return chain(anchor_id, text[start + n : start + n + self._count])
        return chain(anchor_id, [])


class DraftProposer:
    """The DFlash drafter: its argmax chain, a chain drawn from its own softmax when `sampling` says so,
    or with a budget its tree (built at temperature 1 whatever the target's). `features` replaces
    what the target gives (a control: another sample's).
    """

    def __init__(
        self,
        drafter: DFlash,
        features: Tensor | None = None,
        *,
        tree_budget: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._drafter, self._other, self._budget = drafter, features, tree_budget
        self._sampling = sampling
        self._cache = ContextCache(drafter)

    def extend(self, token_ids: list[int], features: Tensor) -> None:
        if self._other is not None:
            at = (torch.arange(features.shape[0]) + self._cache.length) % self._other.shape[0]
            features = self._other[at.to(self._other.device)]
        self._cache.append(features)

    def propose(self, anchor_id: int) -> Draft:
        logits = self._drafter.slots(anchor_id, self._cache)
        if self._budget is not None:
            return best_first(anchor_id, logits, self._budget)
        if self._sampling is None or self._sampling.greedy:
            return chain(anchor_id, logits.argmax(-1).tolist())
        q = self._sampling.probabilities(logits)
        return chain(anchor_id, self._sampling.draw(q), q)
