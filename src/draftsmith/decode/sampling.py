"""Sampled decoding that keeps the target's distribution: per-node draws for deterministic drafts (trees,
lookup, argmax chains), rejection sampling for sampled chains.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.tree import Draft


@dataclass
class Sampling:
    """How the target is sampled; temperature 0 is greedy. One generator a prompt, on the CPU, so that
    a text depends on its seed alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    @property
    def greedy(self) -> bool:
        """Whether every choice is the argmax."""
        return self.temperature == 0

    def probabilities(self, logits_TV: Tensor) -> Tensor:
        """[T, V] on the CPU, in fp64: softmax(logits / temperature) over the top_k most probable
        tokens (0: all) and the smallest set of them that holds top_p, renormalised.
        """
        p = (logits_TV.double().cpu() / self.temperature).softmax(-1)
        if 0 < self.top_k < p.shape[-1]:
            p = p.masked_fill(p < p.topk(self.top_k).values[..., -1:], 0.0)
        if self.top_p < 1:
            values, order = p.sort(dim=-1, descending=True)
            before = values.cumsum(-1) - values
            kept = values.masked_fill(before >= self.top_p * values.sum(-1, keepdim=True), 0.0)
            p = torch.zeros_like(p).scatter(-1, order, kept)
        return p / p.sum(-1, keepdim=True)

    def draw(self, p_TV: Tensor) -> list[int]:
        """One token of each row."""
        return torch.multinomial(p_TV, 1, generator=self._random)[:, 0].tolist()

    def uniform(self, count: int) -> list[float]:
        """Numbers in [0, 1)."""
        return torch.rand(count, generator=self._random, dtype=torch.float64).tolist()

    def decide(self, draft: Draft, logits_TV: Tensor) -> tuple[list[int], int]:
        """The accepted path and the token that follows it. `logits` are the target's at each node."""
        if self.greedy:
            choices = logits_TV.argmax(-1).tolist()
        elif draft.q is None:
            choices = self.draw(self.probabilities(logits_TV))
        else:
            return self._reject(draft.tokens[1:], draft.q, self.probabilities(logits_TV))
        path = draft.walk(choices)
        return path, choices[path[-1]]

    def _reject(self, drafts: list[int], q_LV: Tensor, p_TV: Tensor) -> tuple[list[int], int]:
        """Speculative sampling (arXiv:2211.17192): draft t is kept with probability min(1, p/q);
        the first that is not is replaced by a draw from max(p - q, 0).
        """
        for slot, (token, u) in enumerate(zip(drafts, self.uniform(len(drafts)), strict=True)):
            p, q = float(p_TV[slot, token]), float(q_LV[slot, token])
            if u * q >= p:
                residual = (p_TV[slot] - q_LV[slot]).clamp_min(0)
                return list(range(slot + 1)), self.draw(residual[None])[0]
        return list(range(len(drafts) + 1)), self.draw(p_TV[len(drafts)][None])[0]
