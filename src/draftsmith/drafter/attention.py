"""What a block may see, and attention over it: the context strictly before the block's anchor in its own
sample, and the block itself; never another block or sample.

Full layers are bidirectional inside the block. Sliding layers are causal there, and see token k from
position q when q - k < window. Two ways, equal to rounding: sample by sample with dense masks (CPU),
and FlexAttention over the whole row with a mask of tiles that is made on the GPU without waiting.

Shapes: b batch, n heads, N context tokens, A blocks of B positions, Q = A * B.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafter.blocks import Blocks

TILE = 128
KV = tuple[Tensor, Tensor]
"""Keys and values [b, m, T, d]."""


@dataclass(frozen=True)
class BySample:
    """Tokens and blocks of each sample of a row, and its dense mask [q, tokens + q], q = its block
    positions.
    """

    spans: list[tuple[int, int, int, int]]
    masks: list[Tensor]
    block_size: int


Mask = BySample | BlockMask | Tensor | None
"""Tensor: dense, True = visible; None: all is visible."""


def attend(q_bnQd: Tensor, context: KV, own: KV, mask: Mask) -> Tensor:
    """[b, n, Q, d]: the block positions' attention over the context and their own keys."""
    if isinstance(mask, BySample):
        return _by_sample(q_bnQd, context, own, mask)
    k, v = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    if isinstance(mask, BlockMask):
        out = flex_attention(q_bnQd, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor), "no log-sum-exp was asked for"
        return out
    return F.scaled_dot_product_attention(q_bnQd, k, v, attn_mask=mask, enable_gqa=True)


def _by_sample(q_bnQd: Tensor, context: KV, own: KV, mask: BySample) -> Tensor:
    B, out = mask.block_size, []
    for (first, last, begin, end), seen in zip(mask.spans, mask.masks, strict=True):
        mine = slice(begin * B, end * B)
        k, v = (
            torch.cat([c[:, :, first:last], o[:, :, mine]], dim=2)
            for c, o in zip(context, own, strict=True)
        )
        out.append(
            F.scaled_dot_product_attention(
                q_bnQd[:, :, mine], k, v, attn_mask=seen, enable_gqa=True
            )
        )
    return torch.cat(out, dim=2)


def by_sample(blocks: Blocks, block_size: int, *, window: int | None, causal: bool) -> BySample:
    """The masks of a row's samples."""
    masks = []
    for first, last, begin, end in blocks.spans:
        anchors = blocks.anchors[begin:end] - first
        masks.append(visibility(anchors, last - first, block_size, window=window, causal=causal))
    return BySample(blocks.spans, masks, block_size)


def visibility(anchor_A: Tensor, S: int, B: int, *, window: int | None, causal: bool) -> Tensor:
    """[A*B, S + A*B] bool, True = visible, of one sample of S tokens. `window` None: a full layer;
    `causal`: inside the block.
    """
    A, device = len(anchor_A), anchor_A.device
    anchor_Q = anchor_A.repeat_interleave(B)
    slot = torch.arange(A * B, device=device) % B
    block = torch.arange(A * B, device=device) // B
    context = torch.arange(S, device=device)
    sees_context = context < anchor_Q[:, None]
    sees_block = block[:, None] == block
    gap = slot[:, None] - slot
    if causal:
        sees_block &= gap >= 0
    if window is not None:
        sees_context &= (anchor_Q + slot)[:, None] - context < window
        sees_block &= gap.abs() < window
    return torch.cat([sees_context, sees_block], dim=-1)


def whole_tiles(num_blocks: int, block_size: int) -> int:
    """So many blocks that their positions fill tiles."""
    step = TILE // math.gcd(TILE, block_size)
    return -(-num_blocks // step) * step


def flex_mask(
    blocks: Blocks, num_context: int, block_size: int, *, window: int | None, causal: bool
) -> BlockMask:
    """The same as tiles: `num_context` tokens (a multiple of TILE) and the blocks' own positions. Tiles
    that nothing sees are left out, those that all see need no look at the cells.
    """
    N, B, A = num_context, block_size, len(blocks.anchors)
    anchors, begins = blocks.anchors.int(), blocks.begins.int()
    assert N % TILE == 0 and A * B % TILE == 0, f"{N} tokens and {A} blocks of {B} fill no tiles"

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, begin, own, slot = anchors[q // B], begins[q // B], kv - N, q % B
        context = (kv < N) & (kv >= begin) & (kv < anchor)
        block = (kv >= N) & (own // B == q // B)
        if causal:
            block = block & (own % B <= slot)
        if window is not None:
            context = context & (anchor + slot - kv < window)
            block = block & ((slot - own % B).abs() < window)
        return context | block

    some, all_ = _tiles(anchors, begins, N, B, window)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~all_), *_listed(all_), BLOCK_SIZE=TILE, mask_mod=visible,
        seq_lengths=(A * B, N + A * B),
    )  # fmt: skip


def _tiles(
    anchor_A: Tensor, begin_A: Tensor, N: int, B: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """[Q / TILE, (N + Q) / TILE] bool: tiles of which some cell is visible (at least), and tiles of
    which all are.
    """
    device, num_q = anchor_A.device, len(anchor_A) * B // TILE
    of_q = torch.arange(len(anchor_A) * B, device=device)
    block = of_q // B
    anchor, begin = anchor_A[block].view(num_q, TILE), begin_A[block].view(num_q, TILE)
    at = anchor + (of_q % B).view(num_q, TILE)
    empty = anchor == begin  # an anchor on its sample's first token, or a block that fills up
    low = begin if window is None else torch.maximum(begin, at - window + 1)
    first = torch.where(empty, N, low).amin(1, keepdim=True)
    last = torch.where(empty, 0, anchor).amax(1, keepdim=True)
    left = torch.arange(0, N, TILE, device=device)
    some = (left < last) & (left + TILE > first)
    all_ = (left >= low.amax(1, keepdim=True)) & (left + TILE <= anchor.amin(1, keepdim=True))
    own = torch.arange(0, num_q * TILE, TILE, device=device)
    block = block.view(num_q, TILE)
    mine_first, mine_last = block[:, :1] * B, (block[:, -1:] + 1) * B
    some_own = (own < mine_last) & (own + TILE > mine_first)
    return torch.cat([some, some_own], 1), torch.cat([all_, torch.zeros_like(some_own)], 1)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, rows] and indices [1, 1, rows, columns] of a map's tiles, those that are set
    first.
    """
    order = tiles.int().argsort(dim=1, descending=True, stable=True).int()
    return tiles.sum(1).int()[None, None], order[None, None]
