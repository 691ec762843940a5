"""The DFlash drafter, z-lab's network name for name (arXiv:2602.06036; z-lab/dflash
dflash/model.py).

Shapes: b batch, Q block positions of all blocks, N context tokens, H hidden, n heads, m KV heads, d
head dim, V vocab. The target's features are fused once, hidden_norm(fc(.)), and give every layer
keys and values through the same k_proj and v_proj as the block's own tokens, but without
input_layernorm. Norms are plain (weight 1 is identity); RoPE turns the whole head at absolute
positions. Embedding and lm_head are the target's and frozen; they are not in the checkpoint.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.drafter.attention import KV, Mask, attend, visibility
from draftsmith.drafter.config import DrafterShape


class RMSNorm(nn.Module):
    """weight * x / rms(x), the root in fp32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)  # master weights may be wider than x


def rotate(x_bnTd: Tensor, cos_bTd: Tensor, sin_bTd: Tensor) -> Tensor:
    """Neox-style RoPE over the whole head."""
    first, second = x_bnTd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_bnTd * cos_bTd[:, None] + turned * sin_bTd[:, None]


class Attention(nn.Module):
    """Queries from the block; keys and values from the context's fused features and from the block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        H, n, m, d = (
            shape.hidden_size,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.head_dim = d
        self.q_proj, self.o_proj = nn.Linear(H, n * d, bias=False), nn.Linear(n * d, H, bias=False)
        self.k_proj, self.v_proj = nn.Linear(H, m * d, bias=False), nn.Linear(H, m * d, bias=False)
        self.q_norm, self.k_norm = RMSNorm(d, shape.rms_norm_eps), RMSNorm(d, shape.rms_norm_eps)

    def keys_values(self, x_bTH: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [b, m, T, d] of context or block tokens."""
        k, v = (
            proj(x_bTH).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj)
        )
        return rotate(self.k_norm(k).transpose(1, 2), *rope), v.transpose(1, 2)

    def forward(
        self,
        x_bQH: Tensor,
        rope: tuple[Tensor, Tensor],
        context: KV,
        mask: Mask,
    ) -> Tensor:
        q = rotate(
            self.q_norm(self.q_proj(x_bQH).unflatten(-1, (-1, self.head_dim))).transpose(1, 2),
            *rope,
        )
        out = attend(q, context, self.keys_values(x_bQH, rope), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        H, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (
            nn.Linear(H, inner, bias=False),
            nn.Linear(H, inner, bias=False),
        )
        self.down_proj = nn.Linear(inner, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x_bQH: Tensor,
        rope: tuple[Tensor, Tensor],
        context_bNH: Tensor,
        context_rope: tuple[Tensor, Tensor],
        mask: Mask,
    ) -> Tensor:
        """Training: the context's keys and values are made here, where the layer's weights are whole
        and its compiled code begins.
        """
        return self.step(x_bQH, rope, self.self_attn.keys_values(context_bNH, context_rope), mask)

    def step(self, x_bQH: Tensor, rope: tuple[Tensor, Tensor], context: KV, mask: Mask) -> Tensor:
        """The same with the context's keys and values at hand."""
        x_bQH = x_bQH + self.self_attn(self.input_layernorm(x_bQH), rope, context, mask)
        return x_bQH + self.mlp(self.post_attention_layernorm(x_bQH))


class Layers(nn.ModuleList):
    """A ModuleList that says what it holds."""

    def __iter__(self) -> Iterator[Layer]:  # type: ignore[override]  # narrower than Module
        return super().__iter__()  # type: ignore[return-value]


class DFlash(nn.Module):
    """The network (11L + 3 tensors) plus, unregistered, the target's frozen embedding and lm_head."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = Layers(Layer(shape) for _ in range(shape.num_layers))
        self.fc = nn.Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.recompute = False
        """Make the layers' activations again in the backward pass."""
        self._frozen: tuple[Tensor, Tensor, float] | None = None

    @classmethod
    def empty(cls, shape: DrafterShape, device: torch.device | str) -> "DFlash":
        """Memory without values: torch's own first ones take 15 s at 27B, for nothing."""
        with torch.device("meta"):
            drafter = cls(shape)
        return drafter.to_empty(device=device)

    def init_weights(self, seed: int) -> "DFlash":
        """Normal(0, 0.02) matrices, as every published recipe; norms at 1. Drawn where the weights are: a GPU
        draws others than a CPU.
        """
        device = self.fc.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    drawn = torch.randn(parameter.shape, generator=generator, device=device)
                    parameter.copy_(drawn * 0.02)
                else:
                    parameter.fill_(1.0)
        return self

    def share(
        self,
        embedding_VH: Tensor,
        lm_head_VH: Tensor,
        softcap: float = 0.0,
        *,
        dtype: torch.dtype | None = None,
    ) -> "DFlash":
        """Borrow the target's embedding and lm_head, in the drafter's dtype or in `dtype`. They are
        neither trained nor saved.
        """
        assert embedding_VH.shape[-1] == self.shape.hidden_size, (
            "drafter and target have the same hidden size"
        )
        place = (self.fc.weight.device, dtype or self.fc.weight.dtype)
        embedding = embedding_VH.detach().to(*place)
        head = embedding if lm_head_VH is embedding_VH else lm_head_VH.detach().to(*place)
        self._frozen = (embedding, head, softcap)
        return self

    @property
    def shared(self) -> tuple[Tensor, Tensor, float]:
        """What share() borrowed."""
        assert self._frozen is not None, "share() the target's embedding and lm_head first"
        return self._frozen

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the target's embedding."""
        return F.embedding(ids, self.shared[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's lm_head on the drafter's output."""
        _, head, softcap = self.shared
        logits = F.linear(hidden, head)
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    def fuse(self, features: Tensor) -> Tensor:
        """[..., taps, H] -> [..., H], the context every layer shares."""
        return self.hidden_norm(self.fc(features.flatten(-2)))

    def rope(self, positions_bT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [b, T, d], computed in fp32 as the servers do."""
        d = self.shape.head_dim
        wide = torch.promote_types(dtype, torch.float32)
        inverse = 1.0 / self.shape.rope_theta ** (
            torch.arange(0, d, 2, device=positions_bT.device, dtype=torch.float32) / d
        )
        angles = (positions_bT[..., None].float() * inverse).repeat(1, 1, 2).to(wide)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self,
        noise_bQH: Tensor,
        positions_bQ: Tensor,
        features_bNKH: Tensor,
        context_positions_bN: Tensor,
        masks: dict[str, Mask],
        *,
        num_context: int | None = None,
    ) -> Tensor:
        """Training: hidden [b, Q, H] of all blocks at once. `masks` per layer type. `num_context`: fill
        the context up to so many tokens, so that the layers see one shape.
        """
        fill = 0 if num_context is None else num_context - features_bNKH.shape[1]
        context = F.pad(self.fuse(features_bNKH), (0, 0, 0, fill)).to(noise_bQH.dtype)
        context_positions = F.pad(context_positions_bN, (0, fill))
        rope, context_rope = (
            self.rope(p, noise_bQH.dtype) for p in (positions_bQ, context_positions)
        )
        x = noise_bQH
        for layer, kind in zip(self.layers, self.shape.layer_types, strict=True):
            args = (x, rope, context, context_rope, masks[kind])
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(layer, *args, use_reentrant=False) if again else layer(*args)
        return self.norm(x)

    def draft(self, anchor_id: int, cache: "ContextCache") -> list[int]:
        """Greedy tokens for slots 1..B-1 after `anchor_id`."""
        return self.slots(anchor_id, cache).argmax(-1).tolist()

    def slots(self, anchor_id: int, cache: "ContextCache") -> Tensor:
        """Logits [B - 1, V] of slots 1..B-1 after `anchor_id`, which stands at position cache.length."""
        return self.slots_at([anchor_id], cache.length, cache)[0]

    @torch.inference_mode()
    def slots_at(self, anchor_ids: list[int], first: int, cache: "ContextCache") -> Tensor:
        """Logits [A, B - 1, V] after each of these tokens, which stand at first, first + 1, ...; the
        cache holds the text up to the last of them, and each sees what stands before it alone.
        """
        A, B, device = len(anchor_ids), self.shape.block_size, self.fc.weight.device
        length = first + A - 1
        assert length <= cache.length, "an anchor's context is committed"
        ids = torch.full((A, B), self.shape.mask_token_id, device=device)
        ids[:, 0] = torch.tensor(anchor_ids, device=device)
        anchors = torch.arange(first, first + A, device=device)
        positions = (anchors[:, None] + torch.arange(B, device=device)).view(1, -1)
        x = self.embed(ids.view(1, -1))
        rope = self.rope(positions, x.dtype)
        masks = {kind: self._mask_at(kind, anchors, length) for kind in set(self.shape.layer_types)}
        for i, (layer, kind) in enumerate(zip(self.layers, self.shape.layer_types, strict=True)):
            x = layer.step(x, rope, cache.layer(i, length), masks[kind])
        return self.logits(self.norm(x.view(A, B, -1)[:, 1:]))

    def _mask_at(self, kind: str, anchors_A: Tensor, length: int) -> Tensor | None:
        window, causal = self.shape.window(kind), self.shape.is_causal(kind)
        if window is None and not causal and len(anchors_A) == 1:
            return None
        B = self.shape.block_size
        return visibility(anchors_A, length, B, window=window, causal=causal)[None, None]


class ContextCache:
    """Keys and values of the committed text for every drafter layer, one prompt. Memory is doubled
    as it grows.
    """

    def __init__(self, drafter: DFlash) -> None:
        self._drafter, self.length = drafter, 0
        self._store: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def append(self, features_TKH: Tensor) -> None:
        """Add tokens that the target has committed."""
        like = self._drafter.fc.weight
        context = self._drafter.fuse(features_TKH.to(like.device, like.dtype))[None]
        end = self.length + context.shape[1]
        rope = self._drafter.rope(
            torch.arange(self.length, end, device=like.device)[None], like.dtype
        )
        for i, layer in enumerate(self._drafter.layers):
            new: Any = layer.self_attn.keys_values(context, rope)
            if len(self._store) <= i:
                self._store.append((new[0][:, :, :0], new[1][:, :, :0]))
            self._store[i] = tuple(self._grown(old, end) for old in self._store[i])  # type: ignore[assignment]
            for old, fresh in zip(self._store[i], new, strict=True):
                old[:, :, self.length : end] = fresh
        self.length = end

    def layer(self, i: int, length: int) -> tuple[Tensor, Tensor]:
        """Layer i's keys and values [1, m, length, d] of the first `length` tokens."""
        k, v = self._store[i]
        return k[:, :, :length], v[:, :, :length]

    def _grown(self, old: Tensor, need: int) -> Tensor:
        if old.shape[2] >= need:
            return old
        grown = old.new_empty(*old.shape[:2], max(need, 2 * old.shape[2], 64), old.shape[3])
        grown[:, :, : self.length] = old[:, :, : self.length]
        return grown
