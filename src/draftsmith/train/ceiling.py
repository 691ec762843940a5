"""What a training step cannot be faster than: its own matrix products, alone, on this device.

Forward, towards the inputs, towards the weights; none towards the features or the frozen lm_head, which
nobody needs; none twice; attention's own are left out.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafter.config import DrafterShape

LOGITS = 1 << 30  # of one product: logits are made a part at a time

Product = tuple[int, int, int, bool, bool]
"""Rows, in, out of a linear layer; whether a gradient towards its input, its weight is needed."""


def products_of(
    shape: DrafterShape, num_tokens: int, num_anchors: int, num_labels: int
) -> list[Product]:
    """A micro-batch's linear layers."""
    H, inner, Q = shape.hidden_size, shape.intermediate_size, num_anchors * shape.block_size
    heads, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    layer = [(Q, H, heads), (Q, heads, H), (Q, H, inner), (Q, H, inner), (Q, inner, H)]
    layer += [(rows, H, kv) for rows in (Q, num_tokens) for _ in "kv"]
    out = [(*one, True, True) for one in layer * shape.num_layers]
    out.append((num_tokens, len(shape.taps) * H, H, False, True))  # fc: features need no gradient
    return [*out, (num_labels, H, shape.vocab_size, True, False)]  # the head is frozen


def replay_of(
    products: list[Product], device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """A function that makes these products and nothing else."""
    held: dict[tuple[int, int], Tensor] = {}
    chunk = max(1, LOGITS // products[-1][2])

    def tensor(rows: int, columns: int) -> Tensor:
        if (rows, columns) not in held:
            held[rows, columns] = torch.randn(rows, columns, device=device, dtype=dtype)
        return held[rows, columns]

    def replay() -> None:
        for rows, width, out, to_input, to_weight in products:
            for first in range(0, rows, chunk):
                part = min(chunk, rows - first)
                x, weight, grad = tensor(part, width), tensor(out, width), tensor(part, out)
                F.linear(x, weight)
                if to_input:
                    torch.mm(grad, weight)
                if to_weight:
                    torch.mm(grad.T, x)

    return replay


def seconds_of(products: list[Product], device: torch.device, dtype: torch.dtype) -> float:
    """On a GPU: the best of three, and the memory given back."""
    replay, best = replay_of(products, device, dtype), float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    del replay
    torch.cuda.empty_cache()
    return best
