"""Qwen3.5's decoder layers on packed rows with little between their matrix products: projections that
read the same input are one product, what is elementwise is one kernel each, the last product adds
onto the residual.

Stands in the layer class's forward for the time of one packed forward. On a GPU the small functions
below are compiled and the convolution is Triton's (conv_triton.py); on a CPU the same code runs
eagerly, which is how it is tested against the library's layers. The formulas are those of
transformers 5.24 models/qwen3_5/modeling_qwen3_5.py.

Shapes: T tokens of the row, H hidden size, n/m query and key heads, d head size; Gated DeltaNet: h/Hk
value and key heads, K/V head sizes.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.target.fused import compiled, normed_apart

FAMILIES = {"qwen3_5_text": "Qwen3_5DecoderLayer", "qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer"}
GDN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Pieces:
    """What a packed row does at its samples' boundaries: positions in the sample [T], and functions
    with the library's arguments.
    """

    positions: Tensor
    rule: Callable[..., tuple[Tensor, None]]
    conv: Callable[..., Tensor]
    attention: Callable[..., tuple[Tensor, None]]


def fits(decoder: nn.Module) -> bool:
    """Whether this decoder is of these families, unquantised and without biases on what is merged."""
    config = getattr(decoder, "config", None)
    if getattr(config, "model_type", None) not in FAMILIES or config.hidden_act != "silu":  # type: ignore[union-attr]
        return False
    wanted = {*GDN, *ATTENTION, *MLP, "o_proj", "out_proj", "down_proj"}
    found = [module for name, module in decoder.named_modules() if name.split(".")[-1] in wanted]
    return all(type(x) is nn.Linear and x.bias is None for x in found)


@contextlib.contextmanager
def own_layers(decoder: nn.Module, pieces: Pieces) -> Iterator[None]:
    """For the time of the block, this decoder's layers run the forward below."""
    module = importlib.import_module(type(decoder).__module__)
    holder = getattr(module, FAMILIES[decoder.config.model_type])  # type: ignore[union-attr, index]
    original = holder.forward

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        norm = self.input_layernorm
        normed = _run(rms_norm, hidden_states, norm.weight, norm.eps)
        if self.block_type == "linear_attention":
            mixed = _gdn(self.linear_attn, normed, pieces)
        else:
            mixed = _attention(self.self_attn, normed, position_embeddings, pieces)
        norm = self.post_attention_layernorm
        x, normed = _run(add_norm, hidden_states, mixed, norm.weight, norm.eps)
        return _feed_forward(self.mlp, x, normed)

    holder.forward = forward
    try:
        yield
    finally:
        holder.forward = original


def _gdn(layer: Any, x_1TH: Tensor, pieces: Pieces) -> Tensor:
    mixed = F.linear(x_1TH, merged(*(getattr(layer, name) for name in GDN)))
    heads = layer.num_v_heads
    sizes = [2 * layer.key_dim + layer.value_dim, layer.value_dim, heads, heads]
    qkv, z, b, a = mixed.split(sizes, dim=-1)
    q, k, v = _convolved(layer, qkv, pieces)
    g, beta = _run(gates, a, b, layer.A_log, layer.dt_bias)
    out, _ = pieces.rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False)
    z = z.unflatten(-1, (heads, layer.head_v_dim))
    norm = layer.norm
    out = _run(norm_gate, out, z, norm.weight, norm.variance_epsilon)
    return F.linear(out.flatten(-2), layer.out_proj.weight)


def _convolved(layer: Any, qkv_1TD: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [1, T, Hk, K] of norm 1, v [1, T, h, V], contiguous."""
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    sizes = (layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)
    if qkv_1TD.is_cuda:
        from draftsmith.target import conv_triton

        if conv_triton.fits(sizes, weight, bias, layer.activation):
            return conv_triton.conv_split(qkv_1TD, weight, pieces.positions, sizes)
    y = pieces.conv(qkv_1TD.transpose(1, 2), weight, bias, activation=layer.activation)
    parts = y.transpose(1, 2).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    dims = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    return normed_apart(*(x.unflatten(-1, (-1, d)) for x, d in zip(parts, dims, strict=True)))


def _attention(layer: Any, x_1TH: Tensor, rope: tuple[Tensor, Tensor], pieces: Pieces) -> Tensor:
    d = layer.head_dim
    sizes = [getattr(layer, name).out_features for name in ATTENTION]
    mixed = F.linear(x_1TH, merged(*(getattr(layer, name) for name in ATTENTION)))
    q, k, v = (part.unflatten(-1, (-1, d)) for part in mixed.split(sizes, dim=-1))
    q = q.flatten(-2).unflatten(-1, (-1, 2 * d))
    q, gate = q.chunk(2, dim=-1)
    weights = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    q, k = _run(norm_rope, q, k, *weights, *rope)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = pieces.attention(layer, q, k, v, None, scaling=layer.scaling)
    return F.linear(_run(gate_out, out, gate).flatten(-2), layer.o_proj.weight)


def _feed_forward(mlp: Any, x_1TH: Tensor, normed_1TH: Tensor) -> Tensor:
    if not hasattr(mlp, "down_proj"):  # experts
        out = mlp(normed_1TH)
        return x_1TH + (out[0] if isinstance(out, tuple) else out)
    both = F.linear(normed_1TH, merged(*(getattr(mlp, name) for name in MLP)))
    inner = _run(swiglu, both)
    x_1TH[0].addmm_(inner[0], mlp.down_proj.weight.t())  # the sum is the product's own last step
    return x_1TH


def merged(*layers: nn.Linear) -> Tensor:
    """The weights of these one below another [rows, H]. The first call moves them together, and makes
    each layer's weight a part of the whole: no second copy is kept.
    """
    weights = [layer.weight for layer in layers]
    rows, columns = sum(len(w) for w in weights), weights[0].shape[1]
    begin = weights[0].storage_offset()
    starts = [begin + columns * sum(len(w) for w in weights[:i]) for i in range(len(weights))]
    storage = weights[0].untyped_storage().data_ptr()
    together = all(
        w.untyped_storage().data_ptr() == storage and w.storage_offset() == start
        for w, start in zip(weights, starts, strict=True)
    )
    if not together:
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([w.detach() for w in weights])
            for layer, part in zip(layers, whole.split([len(w) for w in weights]), strict=True):
                layer.weight.data = part
    return layers[0].weight.detach().as_strided((rows, columns), (columns, 1))


def _run(function: Callable[..., Any], *args: Any) -> Any:
    return compiled(function)(*args) if args[0].is_cuda else function(*args)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred weight, in fp32, rounded once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm."""
    x = x + y
    return x, rms_norm(x, weight, eps)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay (fp32) and beta [1, T, h]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return decay.contiguous(), b.sigmoid().contiguous()


def norm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gated RMSNorm over the last dimension: weight * norm(x) * silu(z)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * normed.type_as(x)) * F.silu(z.float())).type_as(x).contiguous()


def norm_rope(
    q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normed and rotated, [1, T, n, d] and [1, T, m, d]; cos and sin [1, T, rotated dims]."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    size = cos.shape[-1]

    def turn(x: Tensor, weight: Tensor) -> Tensor:
        x = rms_norm(x, weight, eps)
        head, rest = x[..., :size], x[..., size:]
        low, high = head.chunk(2, dim=-1)
        turned = head * cos + torch.cat([-high, low], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)

    return turn(q, wq), turn(k, wk)


def gate_out(out: Tensor, gate: Tensor) -> Tensor:
    """Attention's output times its gate [1, T, n, d]."""
    return out * gate.sigmoid()


def swiglu(both: Tensor) -> Tensor:
    """silu(first half) * second half."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up
