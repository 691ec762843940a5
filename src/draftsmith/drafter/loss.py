"""Slot-weighted cross-entropy through the frozen lm_head, in chunks, and what training can say
about acceptance.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.drafter.blocks import Blocks
from draftsmith.drafter.model import DFlash

CHUNK_LOGITS = 1 << 26  # logits of one chunk: 256 MiB in fp32, whatever the vocabulary


@dataclass(frozen=True)
class BlockLoss:
    """`weighted_sum` carries the gradient; divide it by the step's total weight. `correct` [b, A,
    B] per slot.
    """

    weighted_sum: Tensor
    correct: Tensor


def block_loss(drafter: DFlash, hidden_bQH: Tensor, blocks: Blocks) -> BlockLoss:
    """sum over labelled slots of w_k * CE. Logits live one chunk at a time and are made again in
    the backward pass.
    """
    index = blocks.valid.flatten().nonzero()[:, 0]
    hidden, labels = hidden_bQH.flatten(0, 1)[index], blocks.labels.flatten()[index]
    weights = blocks.weights.flatten()[index]
    total = hidden_bQH.new_zeros((), dtype=torch.float32)
    hits = []
    step = max(1, CHUNK_LOGITS // drafter.shape.vocab_size)
    for start in range(0, len(index), step):
        part = slice(start, start + step)
        chunk = (drafter, hidden[part], labels[part], weights[part])
        again = step < len(index)  # one chunk's logits may as well be kept
        loss, hit = checkpoint(_chunk, *chunk, use_reentrant=False) if again else _chunk(*chunk)
        total = total + loss
        hits.append(hit)
    correct = torch.zeros_like(blocks.valid).flatten()
    if hits:
        correct[index] = torch.cat(hits)
    return BlockLoss(total, correct.view(blocks.valid.shape[0], -1, drafter.shape.block_size))


def _chunk(
    drafter: DFlash, hidden: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    logits = drafter.logits(hidden).float()
    loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    return loss, logits.argmax(-1) == labels


def leading_correct(correct_bAB: Tensor) -> Tensor:
    """[b, A] leading slots guessed right: accepted drafts, uniform over anchors (not the loop's
    tau, but its trend).
    """
    return correct_bAB[..., 1:].cumprod(-1).sum(-1)
