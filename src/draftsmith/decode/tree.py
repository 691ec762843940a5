"""Draft trees (DDTree, arXiv:2604.12989): the most probable prefixes under a block drafter's
independent slots, found best first.

A tree of one path is a chain, so verification knows trees only. Node 0 is the root: the anchor, a
token that is emitted but not yet committed; `tree_budget` does not count it.
"""

import heapq
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Tokens and parents of the nodes, root first (parent -1), every parent before its children. `q`
    [L, V] are the probabilities that a sampled chain's tokens were drawn from; None for drafts that
    were not drawn.
    """

    tokens: list[int]
    parents: list[int]
    q: Tensor | None = None

    @property
    def num_drafted(self) -> int:
        """Nodes without the root."""
        return len(self.tokens) - 1

    def walk(self, choices: list[int]) -> list[int]:
        """The accepted path, from the root along children that are the target's choice at their
        parent. `choices[node]` is what the target emits after that node.
        """
        children = {
            (parent, token): node
            for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
        }
        path = [0]
        while (node := children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(node)
        return path


def chain(anchor_id: int, tokens: list[int], q_LV: Tensor | None = None) -> Draft:
    """A path of these tokens after the anchor."""
    return Draft([anchor_id, *tokens], list(range(-1, len(tokens))), q_LV)


def best_first(
    anchor_id: int, logits_LV: Tensor, budget: int, *, chain_first: bool = True
) -> Draft:
    """The `budget` most probable prefixes of up to L tokens; `logits` of slots 1..L.

    Log-probabilities are fp32 over the whole vocabulary. A popped node pushes its next sibling and
    its first child, both no more probable, so nodes come in order of probability; ties go to the
    smaller ranks (ddtree.py of liranringel/ddtree, by description). With `chain_first` the argmax
    chain comes first whatever its probability: near a block's length a tree would otherwise give up
    depth for breadth and lose to the chain.
    """
    L = logits_LV.shape[0]
    logits = logits_LV.float()
    top = logits.topk(min(budget, logits.shape[-1]), dim=-1)
    scores = (top.values - logits.logsumexp(-1, keepdim=True)).tolist()
    tokens = top.indices.tolist()
    out_tokens, parents = [anchor_id], [-1]
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-log probability, ranks, parent)

    def push(weight: float, ranks: tuple[int, ...], parent: int) -> None:
        if len(ranks) <= L and ranks[-1] < len(scores[0]):
            heapq.heappush(heap, (weight, ranks, parent))

    def emit(weight: float, ranks: tuple[int, ...], parent: int, *, spine: bool) -> int:
        depth, rank = len(ranks) - 1, ranks[-1]
        out_tokens.append(tokens[depth][rank])
        parents.append(parent)
        node, lp = len(parents) - 1, scores[depth]
        if rank + 1 < len(lp):
            push(weight + lp[rank] - lp[rank + 1], (*ranks[:-1], rank + 1), parent)
        if not spine and depth + 1 < L:
            push(weight - scores[depth + 1][0], (*ranks, 0), node)
        return node

    if chain_first:
        node, weight = 0, 0.0
        for depth in range(min(L, budget)):
            weight -= scores[depth][0]
            node = emit(weight, (0,) * (depth + 1), node, spine=True)
    elif L:
        push(-scores[0][0], (0,), 0)
    while heap and len(out_tokens) <= budget:
        weight, ranks, parent = heapq.heappop(heap)
        emit(weight, ranks, parent, spine=False)
    return Draft(out_tokens, parents)
