"""When an answer ends: an end token, the length limit, or a loop. One rule for every method,
applied token by token.
"""

from typing import Literal

StopReason = Literal["eos", "length", "loop"]


class AnswerEnd:
    """Watches one answer. A loop is the first repetition of an n-gram of tokens within the answer."""

    def __init__(self, *, eos_ids: list[int], max_new_tokens: int, loop_ngram: int | None) -> None:
        self._eos, self._max, self._n = frozenset(eos_ids), max_new_tokens, loop_ngram
        self.tokens: list[int] = []
        self._seen: set[tuple[int, ...]] = set()

    def push(self, token: int) -> StopReason | None:
        """Add a token; why the answer ends with it, or None."""
        self.tokens.append(token)
        if token in self._eos:
            return "eos"
        if self._n is not None and len(self.tokens) >= self._n:
            gram = tuple(self.tokens[-self._n :])
            if gram in self._seen:
                return "loop"
            self._seen.add(gram)
        return "length" if len(self.tokens) >= self._max else None
