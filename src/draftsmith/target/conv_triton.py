"""The short convolution of a Gated DeltaNet layer over a packed row, its SiLU, the heads' L2 norm and the
cut into q, k and v, in one pass: the row is read once and written once.

Imported where Triton is, on a GPU alone; packed.py's torch version is the reference. A tap that would reach
before its sample's first token reads nothing: a token knows its position in the sample.

Shapes: T tokens, D channels, W taps, Hk/H key and value heads, K/V head sizes.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Types are checked where Triton need not be.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T = 32
EPS = 1e-6


@triton.jit
def conv_kernel(
    x, weight, positions, out, eps, T, first, heads, x_t,
    HEAD: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Tokens of one head: out [heads / per, T, per, HEAD], `first` the head's first channel."""
    head = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = first + head * HEAD + tl.arange(0, HEAD)
    at = tl.load(positions + t, mask=t < T, other=0)
    y = tl.zeros([BLOCK_T, HEAD], tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        seen = (t < T) & (at >= back)
        rows = (t - back).to(tl.int64) * x_t
        xx = tl.load(x + rows[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        ww = tl.load(weight + c * W + tap).to(tl.float32)
        y += xx.to(tl.float32) * ww[None, :]
    y = y * tl.sigmoid(y)
    y = y.to(out.dtype.element_ty).to(
        tl.float32
    )  # the convolution's output is rounded, as elsewhere
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None]
    part, mine = head // heads, head % heads
    row = (part.to(tl.int64) * T + t) * heads + mine
    where = out + row[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(t < T)[:, None])


def fits(
    sizes: tuple[int, int, int, int], weight: Tensor, bias: Tensor | None, activation: str
) -> bool:
    """Whether the kernel takes a layer of (Hk, K, H, V): heads of a power of two, SiLU, no bias."""
    powers = all(16 <= size <= 256 and size & (size - 1) == 0 for size in sizes[1::2])
    return powers and bias is None and activation in ("silu", "swish") and weight.is_contiguous()


def conv_split(
    x_1TD: Tensor, weight_DW: Tensor, positions_T: Tensor, sizes: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [1, T, Hk, K] of norm 1, v [1, T, H, V], contiguous and of x's dtype. x's rows may lie
    apart, its channels not.
    """
    (key_heads, K, value_heads, V), T = sizes, x_1TD.shape[1]
    assert x_1TD.shape[0] == 1 and x_1TD.stride(-1) == 1, "one row, its channels side by side"
    keys, values = x_1TD.new_empty(2, T, key_heads, K), x_1TD.new_empty(1, T, value_heads, V)
    blocks = triton.cdiv(T, BLOCK_T)
    positions = positions_T.to(x_1TD.device)

    def launch(out: Tensor, first: int, *, norm: bool) -> None:
        parts, _, heads, size = out.shape
        kernel: Any = conv_kernel[(blocks, parts * heads)]
        with torch.cuda.device_of(x_1TD):  # Triton launches on the current one
            kernel(
                x_1TD, weight_DW, positions, out, EPS, T, first, heads, x_1TD.stride(1), HEAD=size,
                W=weight_DW.shape[1], NORM=norm, BLOCK_T=BLOCK_T, num_warps=4,
            )  # fmt: skip

    launch(keys, 0, norm=True)
    launch(values, 2 * key_heads * K, norm=False)
    return keys[:1], keys[1:], values
