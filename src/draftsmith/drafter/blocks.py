"""Anchors, labels, weights and masks: which blocks of a sample are trained on, and what each slot
may see.

Shapes: b samples (right-padded to S tokens), A anchors a sample, B block size, Q = A * B block
positions. Rules (arXiv:2602.06036 4.2, and what the servers do): context strictly before the
anchor; no attention across blocks; full layers are bidirectional inside the block; sliding layers
are causal there and see k when q - k < window.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafter.config import DrafterShape


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


@dataclass(frozen=True)
class Blocks:
    """The blocks of a micro-batch. Slots without a label weigh 0."""

    block_ids: Tensor  # [b, Q]: the anchor's token, then mask tokens
    positions: Tensor  # [b, Q]
    labels: Tensor  # [b, Q]
    weights: Tensor  # [b, Q] fp32
    valid: Tensor  # [b, Q] bool: the slot has a label
    masks: dict[str, Tensor | None]  # per layer type [b, 1, Q, S + Q]


def make_blocks(
    input_ids_bS: Tensor,
    loss_mask_bS: Tensor,
    anchors: list[np.ndarray],
    shape: DrafterShape,
    weights_B: Tensor,
) -> Blocks:
    """Blocks at these anchors. Labels stop at the first unsupervised token after the anchor and at
    the sample's end.
    """
    device, (b, S), B = input_ids_bS.device, input_ids_bS.shape, shape.block_size
    A = max(1, max(len(a) for a in anchors))
    padded = np.full((b, A), -1)
    for row, a in enumerate(anchors):
        padded[row, : len(a)] = a
    anchor_bA = torch.from_numpy(padded).to(device)
    real_bA = anchor_bA >= 0
    start_bA = anchor_bA.clamp_min(0)
    slots = torch.arange(B, device=device)
    at_bAB = start_bA[..., None] + slots
    inside = at_bAB < S
    flat = at_bAB.clamp_max(S - 1).flatten(1)
    labels = input_ids_bS.gather(1, flat).view(b, A, B)
    supervised = loss_mask_bS.bool().gather(1, flat).view(b, A, B) & inside & real_bA[..., None]
    valid = supervised.cumprod(-1).bool() & (slots > 0)
    ids = torch.full_like(labels, shape.mask_token_id)
    ids[..., 0] = labels[..., 0]
    return Blocks(
        block_ids=ids.flatten(1),
        positions=at_bAB.flatten(1),
        labels=labels.flatten(1),
        weights=(valid * weights_B.to(device)).flatten(1),
        valid=valid.flatten(1),
        masks={
            kind: visibility(
                start_bA, S, B, window=shape.window(kind), causal=shape.is_causal(kind)
            )
            for kind in set(shape.layer_types)
        },
    )


def visibility(anchor_bA: Tensor, S: int, B: int, *, window: int | None, causal: bool) -> Tensor:
    """[b, 1, A*B, S + A*B] bool, True = visible. `window` None: a full layer; `causal`: inside the
    block.
    """
    b, A = anchor_bA.shape
    device = anchor_bA.device
    query_pos = (anchor_bA[..., None] + torch.arange(B, device=device)).flatten(1)
    anchor_of_query = anchor_bA.repeat_interleave(B, dim=1)
    context = torch.arange(S, device=device)
    sees_context = context < anchor_of_query[..., None]
    block = torch.arange(A * B, device=device) // B
    slot = torch.arange(A * B, device=device) % B
    sees_block = (block[:, None] == block[None]).expand(b, -1, -1)
    gap = slot[:, None] - slot[None]
    if causal:
        sees_block = sees_block & (gap >= 0)
    if window is not None:
        sees_context = sees_context & (query_pos[..., None] - context < window)
        sees_block = sees_block & (gap.abs() < window)
    return torch.cat([sees_context, sees_block], dim=-1)[:, None]
