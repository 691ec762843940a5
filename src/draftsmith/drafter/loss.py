"""Losses through the frozen lm_head without the logits of all slots (248,320 x 512 x 15 in fp32 are
7.6 GB a sequence), and what training can say about acceptance.

The gradient of a row's loss towards its hidden state is made with the loss, chunk by chunk, so the
backward pass neither keeps logits nor makes them again: two matrix products a row and no third.
There is no gradient towards the frozen head. (The idea is Liger-Kernel's fused linear
cross-entropy, arXiv:2410.10989.)

Shapes: M rows (labelled slots), H hidden, V vocabulary, C rows of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafter.blocks import Blocks, dpace_weights
from draftsmith.drafter.model import DFlash

LossName = Literal["ce", "kl", "tv"]
CHUNK_LOGITS = 1 << 26  # logits of one chunk: 128 MiB in bf16, whatever the vocabulary


@dataclass(frozen=True)
class BlockLoss:
    """`weighted_sum` carries the gradient; divide it by the step's total weight, of which this is
    `weight_sum`. `correct` [A, B] per slot.
    """

    weighted_sum: Tensor
    weight_sum: Tensor
    correct: Tensor


def block_loss(
    drafter: DFlash,
    hidden_QH: Tensor,
    blocks: Blocks,
    weights_B: Tensor | None,
    *,
    name: LossName = "ce",
    teacher_NH: Tensor | None = None,
) -> BlockLoss:
    """Sum over labelled slots of weight * loss. `weights_B`: of each slot; None: D-PACE's. `teacher_NH`:
    the target's normed last states, for kl and tv, which compare with its distribution.
    """
    index, B = blocks.labelled, drafter.shape.block_size
    _, head, softcap = drafter.shared
    teacher = None
    if name != "ce":
        assert teacher_NH is not None, f"{name} compares with the target's distribution"
        before = blocks.anchors.repeat_interleave(B)[index] + index % B - 1
        teacher = teacher_NH[before]
    losses, probability, hit = linear_loss(
        hidden_QH[index], head, blocks.labels[index], name=name, teacher_MH=teacher, softcap=softcap
    )
    valid = blocks.valid.view(-1, B)
    if weights_B is None:
        q = torch.zeros(valid.numel(), device=hidden_QH.device).index_copy(0, index, probability)
        weights = dpace_weights(q.view(-1, B), valid).flatten()[index]
    else:
        weights = weights_B[index % B]
    correct = torch.zeros(valid.numel(), dtype=torch.bool, device=hidden_QH.device)
    correct = correct.index_copy(0, index, hit).view(-1, B)
    return BlockLoss((losses * weights).sum(), weights.sum(), correct)


def linear_loss(
    hidden_MH: Tensor,
    head_VH: Tensor,
    labels_M: Tensor,
    *,
    name: LossName = "ce",
    teacher_MH: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [M] losses, the probabilities of the labels, and whether a label is the most probable token.

    ce: -log q(label). kl: sum p log(p / q). tv: half the sum of |p - q|, which is 1 - the acceptance of
    a draft sampled from q; p: the target's distribution after the token before.
    """
    return _LinearLoss.apply(hidden_MH, head_VH, labels_M, name, teacher_MH, softcap)  # type: ignore[return-value]  # torch types it as Any


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        head_VH: Tensor,
        labels_M: Tensor,
        name: LossName,
        teacher_MH: Tensor | None,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        M, device = len(hidden_MH), hidden_MH.device
        rows = max(1, CHUNK_LOGITS // len(head_VH))
        of_rows = _compiled(name) if device.type == "cuda" else FORMULAS[name]
        grads = torch.empty_like(hidden_MH)
        losses, probability = (torch.empty(M, device=device) for _ in range(2))
        hit = torch.empty(M, dtype=torch.bool, device=device)
        with torch.autocast(device.type, enabled=False):
            hidden = hidden_MH.to(head_VH.dtype)
            for first in range(0, M, rows):
                part = slice(first, first + rows)
                logits = F.linear(_filled(hidden[part], rows), head_VH)
                labels = _filled(labels_M[part], rows)
                if name == "ce":
                    made = of_rows(logits, labels, softcap)
                else:
                    assert teacher_MH is not None, f"{name} has a teacher"
                    states = _filled(teacher_MH[part].to(head_VH.dtype), rows)
                    made = of_rows(logits, labels, softcap, F.linear(states, head_VH))
                count = min(rows, M - first)
                losses[part], probability[part], hit[part] = (x[:count] for x in made[:3])
                grads[part] = (made[3] @ head_VH)[:count]
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(probability, hit)
        return losses, probability, hit

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> Any:
        (grads,) = ctx.saved_tensors
        return (grads * of_outputs[0][:, None]).to(grads.dtype), None, None, None, None, None


def _filled(rows_C: Tensor, count: int) -> Tensor:
    """All chunks have one shape: on a GPU a new shape is compiled anew."""
    short = count - len(rows_C)
    if short == 0 or rows_C.device.type == "cpu":
        return rows_C
    return F.pad(rows_C, (0, 0, 0, short) if rows_C.ndim == 2 else (0, short))


def _rows_ce(
    logits_CV: Tensor, labels_C: Tensor, softcap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, probabilities of the labels, hits, and the losses' gradients towards the logits."""
    z, slope = _capped(logits_CV, softcap)
    loss = z.logsumexp(-1) - z.gather(1, labels_C[:, None])[:, 0]
    grad = z.softmax(-1) - _one_hot(labels_C, z)
    return loss, torch.exp(-loss), z.argmax(-1) == labels_C, (grad * slope).to(logits_CV.dtype)


def _rows_kl(
    logits_CV: Tensor, labels_C: Tensor, softcap: float, teacher_CV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, slope = _capped(logits_CV, softcap)
    log_q, log_p = z.log_softmax(-1), _capped(teacher_CV, softcap)[0].log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    loss, label = (p * (log_p - log_q)).sum(-1), q.gather(1, labels_C[:, None])[:, 0]
    return loss, label, z.argmax(-1) == labels_C, ((q - p) * slope).to(logits_CV.dtype)


def _rows_tv(
    logits_CV: Tensor, labels_C: Tensor, softcap: float, teacher_CV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, slope = _capped(logits_CV, softcap)
    q, p = z.softmax(-1), _capped(teacher_CV, softcap)[0].softmax(-1)
    loss, label = 0.5 * (q - p).abs().sum(-1), q.gather(1, labels_C[:, None])[:, 0]
    sign = 0.5 * (q - p).sign()
    grad = q * (sign - (q * sign).sum(-1, keepdim=True))
    return loss, label, z.argmax(-1) == labels_C, (grad * slope).to(logits_CV.dtype)


def _capped(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Logits in fp32 or wider as the target makes them, and the cap's derivative."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not softcap:
        return z, 1.0
    z = softcap * torch.tanh(z / softcap)
    return z, 1 - (z / softcap) ** 2


def _one_hot(labels_C: Tensor, like_CV: Tensor) -> Tensor:
    columns = torch.arange(like_CV.shape[1], device=like_CV.device)
    return (columns == labels_C[:, None]).to(like_CV.dtype)


FORMULAS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]] = {
    "ce": _rows_ce, "kl": _rows_kl, "tv": _rows_tv,
}  # fmt: skip


@cache
def _compiled(name: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    return torch.compile(FORMULAS[name], dynamic=False)


@torch.no_grad()
def block_hits(drafter: DFlash, hidden_QH: Tensor, blocks: Blocks) -> Tensor:
    """[A, B] whether each slot's most probable token is its label."""
    index, B = blocks.labelled, drafter.shape.block_size
    head = drafter.shared[1]
    rows = max(1, CHUNK_LOGITS // len(head))
    hits = torch.zeros(len(blocks.valid), dtype=torch.bool, device=hidden_QH.device)
    for part in index.split(rows):
        most = drafter.logits(hidden_QH[part].to(head.dtype)).argmax(-1)
        hits[part] = most == blocks.labels[part]
    return hits.view(-1, B)
