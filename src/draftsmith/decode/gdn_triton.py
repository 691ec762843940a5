"""Gated DeltaNet over a chain or tree of up to 128 nodes as two Triton kernels: what gdn.gdn_block and
Stash.fold compute, a launch each in place of a dozen.

Imported where Triton is, on a GPU alone; gdn.py is the reference. A program takes one head and BLOCK_V of
its value columns: keys, queries and the T x T products are made again for every part, the state is read
once. Rows are solved one after another: parents come before children, so one pass is exact, where
powers of the matrix would lose digits. Dots run as three TF32 products, which is fp32's precision.

Shapes: B batch, T nodes, H value heads, Hk key heads, K/V head dims.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Types are checked where Triton need not be.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_NODES = 128
BLOCK_V = 32
PRECISION = "tf32x3"


@triton.jit
def block_kernel(
    q, k, v, g, beta, state, seen, out, k_out, u_out, decay_out, eps,
    T, H, HK, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, b_b, b_t, s_b, s_h,
    K: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs [B, T, H, V], normed keys [B, Hk, T, K], u [B, H, T, V], log decay [B, H, T]."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    part = tl.program_id(1)
    hk = h // (H // HK)
    t, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    c = part * BLOCK_V + tl.arange(0, BLOCK_V)
    live = t < T
    rows = live[:, None]
    k_at = k + b * k_b + t[:, None] * k_t + hk * k_h + e[None, :]
    q_at = q + b * q_b + t[:, None] * q_t + hk * q_h + e[None, :]
    k_norm, q_norm = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    for d in range(0, K, BLOCK_K):
        kk = tl.load(k_at + d, mask=rows, other=0.0).to(tl.float32)
        qq = tl.load(q_at + d, mask=rows, other=0.0).to(tl.float32)
        k_norm += tl.sum(kk * kk, axis=1)
        q_norm += tl.sum(qq * qq, axis=1)
    k_norm = tl.rsqrt(k_norm + eps)[:, None]
    q_norm = (tl.rsqrt(q_norm + eps) * (K**-0.5))[:, None]

    first = part == 0
    mine = rows & first & (h % (H // HK) == 0)
    system = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    weights = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    held = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    y = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for d in range(0, K, BLOCK_K):
        kk = tl.load(k_at + d, mask=rows, other=0.0).to(tl.float32) * k_norm
        qq = tl.load(q_at + d, mask=rows, other=0.0).to(tl.float32) * q_norm
        s = tl.load(state + b * s_b + h * s_h + (d + e)[:, None] * V + c[None, :])
        across_k = tl.trans(kk)
        system += tl.dot(kk, across_k, input_precision=PRECISION)
        weights += tl.dot(qq, across_k, input_precision=PRECISION)
        held += tl.dot(kk, s, input_precision=PRECISION)
        y += tl.dot(qq, s, input_precision=PRECISION)
        tl.store(k_out + ((b * HK + hk) * T + t[:, None]) * K + d + e[None, :], kk, mask=mine)

    vv = tl.load(v + b * v_b + t[:, None] * v_t + h * v_h + c[None, :], mask=rows, other=0.0)
    gg = tl.load(g + b * g_b + t * g_t + h, mask=live, other=0.0).to(tl.float32)
    bb = tl.load(beta + b * b_b + t * b_t + h, mask=live, other=0.0).to(tl.float32)
    pairs = rows & live[None, :]
    sees = tl.load(seen + t[:, None] * T + t[None, :], mask=pairs, other=0) != 0
    along = tl.sum(tl.where(sees, gg[None, :], 0.0), axis=1)  # log decay from the root
    across = tl.sum(tl.where(t[:, None] == t[None, :], along[:, None], 0.0), axis=0)
    decay = tl.exp(tl.where(sees, along[:, None] - across[None, :], float("-inf")))
    start = tl.exp(along)[:, None]
    system = tl.where(t[:, None] > t[None, :], system * decay * bb[:, None], 0.0)
    u = bb[:, None] * (vv.to(tl.float32) - start * held)
    for i in range(1, BLOCK_T):
        row = tl.sum(tl.where((t == i)[:, None], system, 0.0), axis=0)
        taken = tl.sum(row[:, None] * u, axis=0)
        u = tl.where((t == i)[:, None], u - taken[None, :], u)
    y = start * y + tl.dot(weights * decay, u, input_precision=PRECISION)

    at = (b * T + t[:, None]) * H + h
    tl.store(out + at * V + c[None, :], y.to(out.dtype.element_ty), mask=rows)
    tl.store(u_out + ((b * H + h) * T + t[:, None]) * V + c[None, :], u, mask=rows)
    tl.store(decay_out + (b * H + h) * T + t, along, mask=live & first)


@triton.jit
def fold_kernel(
    state, k, u, decay, path, length, T, H, HK, s_b, s_h,
    K: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state over the path's nodes, in place."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    hk = h // (H // HK)
    d = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    where = state + b * s_b + h * s_h + d[:, None] * V + c[None, :]
    row = b * H + h
    i = tl.arange(0, BLOCK_P)
    live = i < length
    nodes = tl.load(path + i, mask=live, other=0)
    leaf = tl.load(decay + row * T + tl.load(path + length - 1))
    gap = leaf - tl.load(decay + row * T + nodes, mask=live, other=0.0)
    weight = tl.where(live, tl.exp(tl.where(live, gap, 0.0)), 0.0)
    kk = tl.load(k + ((b * HK + hk) * T + nodes[:, None]) * K + d[None, :])
    uu = tl.load(u + (row * T + nodes[:, None]) * V + c[None, :])
    s = tl.load(where) * tl.exp(leaf)
    s += tl.dot(tl.trans(kk * weight[:, None]), uu, input_precision=PRECISION)
    tl.store(where, s)


def tiles(num_nodes: int, head_dim: int) -> dict[str, int]:
    """How a block's work is cut: more than 64 nodes need more warps and less of the keys at once, to
    stay below 99 KB of shared memory.
    """
    many = num_nodes > 64
    size = max(16, 1 << (num_nodes - 1).bit_length())
    return {
        "BLOCK_T": size, "BLOCK_K": min(head_dim, 16 if many else 32), "BLOCK_V": BLOCK_V,
        "num_warps": 8 if many else 4, "num_stages": 1,
    }  # fmt: skip


def fits(q_BTHK: Tensor, v_BTHV: Tensor, state_BHKV: Tensor) -> bool:
    """Whether the kernels take these: up to MAX_NODES, heads of a power of two, an fp32 state."""
    K, V = state_BHKV.shape[-2:]
    return (
        v_BTHV.shape[1] <= MAX_NODES
        and state_BHKV.dtype == torch.float32
        and q_BTHK.dtype != torch.float64
        and 16 <= K <= 128
        and K & (K - 1) == 0
        and V % BLOCK_V == 0
        and state_BHKV.stride()[2:] == (V, 1)
    )


def block(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    seen_TT: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, V], normed keys [B, Hk, T, K], u [B, H, T, V] and log decay [B, H, T], all
    fp32; the state is not touched.
    """
    B, T, H, V = v_BTHV.shape
    HK, K = k_BTHK.shape[2:]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BTHK, k_BTHK, v_BTHV))
    g, beta = (x if x.stride(-1) == 1 else x.contiguous() for x in (g_BTH, beta_BTH))
    wide = {"device": v.device, "dtype": torch.float32}
    out = torch.empty(B, T, H, V, **wide)
    k_out, u = torch.empty(B, HK, T, K, **wide), torch.empty(B, H, T, V, **wide)
    decay = torch.empty(B, H, T, **wide)
    launch: Any = block_kernel[(B * H, V // BLOCK_V)]
    with torch.cuda.device_of(q):  # Triton launches on the current one
        launch(
            q, k, v, g, beta, state_BHKV, seen_TT.to(torch.int8), out, k_out, u, decay, eps, T, H, HK,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:2], *beta.stride()[:2],
            *state_BHKV.stride()[:2], K=K, V=V, PRECISION=PRECISION, **tiles(T, K),
        )  # fmt: skip
    return out, k_out, u, decay


def fold(state_BHKV: Tensor, k: Tensor, u: Tensor, decay: Tensor, path: Tensor) -> None:
    """Advance the state in place over the path's nodes (int64, on the device)."""
    B, H, K, V = state_BHKV.shape
    size, part = max(16, triton.next_power_of_2(len(path))), min(K, 32)
    launch: Any = fold_kernel[(B * H, V // BLOCK_V, K // part)]
    with torch.cuda.device_of(u):
        launch(
            state_BHKV, k, u, decay, path, len(path), u.shape[2], H, k.shape[1],
            *state_BHKV.stride()[:2], K=K, V=V, BLOCK_P=size, BLOCK_K=part, BLOCK_V=BLOCK_V,
            PRECISION=PRECISION, num_warps=4, num_stages=1,
        )  # fmt: skip
