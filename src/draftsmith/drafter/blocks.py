"""Anchors, labels and weights: which blocks of a row are trained on, and what each slot should say.

Shapes: N tokens of a row (whole samples end to end), A anchors, B block size, Q = A * B block
positions. Made on the CPU from token ids alone, so that a GPU never waits for a count.
Rules (arXiv:2602.06036 4.2): an anchor's token and the next one are supervised; a block's labels end
at the first unsupervised token and at its sample's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafter.config import DrafterShape


def anchor_share(num_anchors: Sequence[int], mean: int) -> float:
    """The share of their places that samples get, all the same one: `mean` anchors a sample on average. A
    long answer then weighs what its length is worth, as it does in tau.
    """
    return min(1.0, mean * len(num_anchors) / max(1, sum(num_anchors)))


def anchor_limit(num_anchors: int, share: float, most: int) -> int:
    """Of a sample with so many places: one at least, where there is one, and `most` at most."""
    return min(num_anchors, most, max(1, round(share * num_anchors)))


def draw_anchors(
    loss_mask: np.ndarray, *, limit: int, seed: int, epoch: int, sample_id: int
) -> np.ndarray:
    """At most `limit` positions p, ascending, whose token and next token are both supervised. Fixed
    by its arguments.
    """
    eligible = np.flatnonzero(loss_mask[:-1] & loss_mask[1:])
    if len(eligible) > limit:
        rng = np.random.default_rng([seed, epoch, sample_id])
        eligible = np.sort(rng.choice(eligible, size=limit, replace=False))
    return eligible


def slot_weights(block_size: int, gamma: float | str) -> Tensor:
    """[B]: 0 for the anchor, exp(-(k-1)/gamma) for slot k. auto: 4 at B 8, 5 at 10, 7 at 16 (the
    paper), linear between.
    """
    if gamma == "auto":
        gamma = float(np.interp(block_size, [2, 8, 10, 16], [1.0, 4.0, 5.0, 7.0]))
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / float(gamma))
    weights[0] = 0.0
    return weights


def dpace_weights(probability_AB: Tensor, valid_AB: Tensor, alpha: float = 0.5) -> Tensor:
    """[A, B]: w_j = sum over m >= j of prod over i <= m of ((1 - alpha) q_i + alpha), where q_i is
    the drafter's probability of slot i's label (D-PACE, arXiv:2605.18810): a slot matters as much as
    the slots before it are likely to be accepted and the slots behind it depend on it.
    """
    kept = torch.where(valid_AB, (1 - alpha) * probability_AB + alpha, 0.0)
    reached = torch.zeros_like(kept)
    reached[:, 1:] = kept[:, 1:].cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1) * valid_AB


@dataclass(frozen=True)
class Blocks:
    """The blocks of a row. Slots without a label are not valid. Blocks that only fill up (see
    make_blocks) begin and stand at token 0 and see nothing but themselves; a row without anchors has
    one, so that gradients of every weight exist, if only zeros: ranks wait for them.
    """

    block_ids: Tensor  # [Q]: the anchor's token, then mask tokens
    positions: Tensor  # [Q], in the block's sample
    labels: Tensor  # [Q]
    valid: Tensor  # [Q] bool: the slot has a label
    anchors: Tensor  # [A], in the row
    begins: Tensor  # [A]: the first token of the anchor's sample, in the row
    context_positions: Tensor  # [N], each token's in its sample
    spans: list[tuple[int, int, int, int]]
    """Of each sample that has blocks: its tokens [first, last) and its blocks [first, last)."""
    labelled: Tensor  # [M]: indices of the valid slots

    def to(self, device: torch.device) -> "Blocks":
        """On the device, without waiting."""
        moved = {
            name: value.pin_memory().to(device, non_blocking=True)
            if device.type == "cuda"
            else value
            for name, value in vars(self).items()
            if torch.is_tensor(value)
        }
        return Blocks(**moved, spans=self.spans)


def make_blocks(
    input_ids_N: Tensor,
    loss_mask_N: Tensor,
    lengths: Sequence[int],
    anchors: Sequence[np.ndarray],
    shape: DrafterShape,
    *,
    argmax_N: Tensor | None = None,
    num_blocks: int | None = None,
) -> Blocks:
    """Blocks at these anchors of each sample, in order. Labels are the text's own tokens, or with
    `argmax_N` what the target finds most probable after the token before. `num_blocks`: fill up to
    so many.
    """
    B, starts = shape.block_size, np.concatenate([[0], np.cumsum(lengths)])
    ids, N = input_ids_N.numpy(), len(input_ids_N)
    counts = [len(a) for a in anchors]
    A, real = num_blocks or max(1, sum(counts)), sum(counts)
    assert real <= A, f"{real} anchors in {A} blocks"
    begins, ends, anchor = (np.zeros(A, np.int64) for _ in range(3))
    begins[:real] = np.repeat(starts[:-1], counts)
    ends[:real] = np.repeat(starts[1:], counts)
    anchor[:real] = begins[:real] + np.concatenate([np.zeros(0, np.int64), *anchors])
    slots = np.arange(B)
    at_AB = anchor[:, None] + slots
    inside = at_AB < ends[:, None]
    at = np.minimum(at_AB, N - 1)
    supervised = loss_mask_N.numpy()[at].astype(bool) & inside
    valid = np.logical_and.accumulate(supervised, axis=1) & (slots > 0)
    labels = ids[at] if argmax_N is None else argmax_N.numpy()[np.maximum(at - 1, 0)]
    block_ids = np.full((A, B), shape.mask_token_id, np.int64)
    block_ids[:, 0] = ids[anchor]
    edges = np.concatenate([[0], np.cumsum(counts)])
    spans = [
        (int(starts[i]), int(starts[i + 1]), int(edges[i]), int(edges[i + 1]))
        for i in range(len(counts))
        if counts[i]
    ] or [(0, int(starts[1]), 0, 1)]
    tensors = {
        "block_ids": block_ids.ravel(),
        "positions": (at_AB - begins[:, None]).ravel(),
        "labels": labels.astype(np.int64).ravel(),
        "valid": valid.ravel(),
        "anchors": anchor,
        "begins": begins,
        "context_positions": np.arange(N) - np.repeat(starts[:-1], lengths),
        "labelled": np.flatnonzero(valid),
    }
    return Blocks(**{name: torch.from_numpy(x) for name, x in tensors.items()}, spans=spans)
