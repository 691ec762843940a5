"""Packed rows: samples end to end in one row of tokens, none seeing another, nothing padded.

Attention layers run per sample (torch's varlen kernel on a GPU); Gated DeltaNet layers reset their
state and their convolution at every boundary (fla's kernels with cu_seqlens on a GPU). Positions
start anew in each sample. No mask tensor is ever built. Transformers resolves the layer's functions
as module globals at call time, so forwards need not be rewritten, and are not but for one family's
speed (qwen3_5_rows.py); its own packed path leaks three tokens of convolution over every boundary when
causal-conv1d is missing, and says nothing (docs/hybrids.md).

Shapes: T tokens of the row, S samples, D channels, H heads, K/V head dims.
"""

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from draftsmith.target import qwen3_5_rows
from draftsmith.target.fused import fused, normed_apart
from draftsmith.target.qwen3_5_rows import Pieces, own_layers

ATTENTION = "draftsmith_packed"
CHUNK, CONV = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
GDN_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
ATTENTION_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
"""`model_type`s that are proven packed (tests/unit/test_packed.py); other ones run right-padded."""


@dataclass(frozen=True)
class PackedRow:
    """One row: ids and positions [1, T], the samples' boundaries [S + 1] as int32, here and on the CPU,
    and as a list.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    bounds: list[int]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample."""
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))


def pack(
    samples: list[list[int]], *, pad_to: int = 0, device: torch.device | str = "cpu"
) -> PackedRow:
    """Lay samples end to end. With `pad_to`, one more sample of zeros fills the row (a longer one up
    to a quarter of it more), so that rows have few shapes and little is compiled or tuned twice.
    """
    rows = [*samples]
    held = sum(len(sample) for sample in samples)
    if held > pad_to > 0:
        step = max(1, pad_to // 4)
        pad_to = -(-held // step) * step
    if held < pad_to:
        rows.append([0] * (pad_to - held))
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    ids = torch.tensor([[i for row in rows for i in row]])
    cpu = torch.tensor(bounds, dtype=torch.int32)
    ids, positions, here = (_moved(x, device) for x in (ids, positions[None], cpu))
    return PackedRow(ids, positions, here, cpu, bounds)


def _moved(x: Tensor, device: torch.device | str) -> Tensor:
    """To the device without waiting for what runs there: from page-locked memory."""
    if torch.device(device).type != "cuda":
        return x
    return x.pin_memory().to(device, non_blocking=True)


def can_pack(model_type: str) -> bool:
    """Whether rows of this family may be packed: proven in tests/unit/test_packed.py."""
    return model_type in GDN_FAMILIES + ATTENTION_FAMILIES


def has_kernels(model_type: str) -> bool:
    """Whether the kernels that pack this family on a GPU are installed: fla's, for GDN layers."""
    return model_type not in GDN_FAMILIES or importlib.util.find_spec("fla") is not None


@contextlib.contextmanager
def packed(model: PreTrainedModel, decoder: nn.Module, row: PackedRow) -> Iterator[None]:
    """For the time of the block, forwards of `decoder` treat their input as this row."""
    _register()
    module = importlib.import_module(type(decoder).__module__)
    names = [name for name in (CHUNK, CONV) if hasattr(module, name)]
    originals = {name: getattr(module, name) for name in names}
    gpu = row.input_ids.device.type == "cuda"
    own = {CHUNK: _fla_rule(row) if gpu else _rule(originals.get(CHUNK), row),
           CONV: _fla_conv(row) if gpu else _conv(row)} if names else {}  # fmt: skip
    before = model.config._attn_implementation or "sdpa"
    _rows.append(row)
    try:
        for name in names:
            setattr(module, name, own[name])
        model.set_attn_implementation(ATTENTION)
        with contextlib.ExitStack() as stack:
            if gpu:
                stack.enter_context(fused(decoder))
            if qwen3_5_rows.fits(decoder):
                pieces = Pieces(row.position_ids[0], own[CHUNK], own[CONV], _attention)
                stack.enter_context(own_layers(decoder, pieces))
            yield
    finally:
        _rows.pop()
        model.set_attn_implementation(before)
        for name, original in originals.items():
            setattr(module, name, original)


_rows: list[PackedRow] = []  # the attention function is registered once and looks the row up


def _register() -> None:
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, H, T, d] -> [1, T, H, d]: causal within each sample, inside the window of sliding layers."""
    row = _rows[-1]
    refused = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    assert not refused, f"attention with {refused} is not packed"
    if q.device.type == "cuda" and q.dtype != torch.float32:  # the kernel knows half precision only
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return _varlen(q, k, v, row, scaling, sliding_window)[None], None
    parts = []
    for start, end in zip(row.bounds, row.bounds[1:], strict=False):
        piece = (x[:, :, start:end] for x in (q, k, v))
        window = _window(end - start, sliding_window, q.device)
        parts.append(
            F.scaled_dot_product_attention(
                *piece, attn_mask=window, is_causal=window is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= length:
        return None
    at = torch.arange(length, device=device)
    gap = at[:, None] - at[None]
    return (gap >= 0) & (gap < window)


def _varlen(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    row: PackedRow,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """torch.nn.attention.varlen, whose signature differs between 2.11 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        groups = q_THd.shape[1] // k_THd.shape[1]
        k_THd, v_THd = (x.repeat_interleave(groups, 1) for x in (k_THd, v_THd))
    if scaling is not None:
        options["scale"] = scaling
    cu, longest = row.cu_seqlens.to(q_THd.device), row.max_length
    out = varlen_attn(q_THd, k_THd, v_THd, cu, cu, longest, longest, **options)
    return out[0] if isinstance(out, tuple) else out


def _rule(original: Any, row: PackedRow) -> Callable[..., tuple[Tensor, None]]:
    """The library's chunk rule, a sample at a time."""

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        kwargs.pop("cu_seqlens", None)
        parts = [
            original(q[:, a:b], k[:, a:b], v[:, a:b], g=g[:, a:b], beta=beta[:, a:b], **kwargs)[0]
            for a, b in zip(row.bounds, row.bounds[1:], strict=False)
        ]
        return torch.cat(parts, dim=1), None

    return rule


def _conv(row: PackedRow) -> Callable[..., Tensor]:
    """Depthwise causal convolution of [1, D, T] whose taps stop at the boundaries. Sums in fp32 and
    rounds once, as the kernels do.
    """

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        lengths = torch.tensor(row.bounds).diff()
        sample = torch.arange(len(lengths)).repeat_interleave(lengths)
        wide, taps = torch.promote_types(x.dtype, torch.float32), weight.shape[-1]
        x_wide, w = x.to(wide), weight.to(wide)
        y = x_wide * w[:, -1:]
        for back in range(1, min(taps, x.shape[-1])):
            same = (sample[back:] == sample[:-back]).to(wide)
            y[:, :, back:] += x_wide[:, :, :-back] * same * w[:, taps - 1 - back, None]
        y = y if bias is None else y + bias.to(wide)[:, None]
        return (y if activation is None else F.silu(y)).to(x.dtype)

    return conv


def _fla_rule(row: PackedRow) -> Callable[..., tuple[Tensor, None]]:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    options = _cpu_bounds(chunk_gated_delta_rule, row)

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if kwargs.get("use_qk_l2norm_in_kernel", False):
            q, k, v = normed_apart(q, k, v)
        out, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            cu_seqlens=row.cu_seqlens.to(q.device),  # layers may be on several GPUs
            **options,
        )
        return out, None

    return rule


def _fla_conv(row: PackedRow) -> Callable[..., Tensor]:
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]

    options = _cpu_bounds(causal_conv1d, row)

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        x_BTD = x.transpose(1, 2).contiguous()
        bounds = row.cu_seqlens.to(x.device)
        y, _state = causal_conv1d(
            x_BTD, weight=weight, bias=bias, activation=activation, cu_seqlens=bounds, **options
        )
        return y.transpose(1, 2)

    return conv


def _cpu_bounds(kernel: Callable[..., Any], row: PackedRow) -> dict[str, Tensor]:
    """The boundaries on the CPU, for a kernel that would else wait for the GPU to read them."""
    known = "cu_seqlens_cpu" in inspect.signature(kernel).parameters
    return {"cu_seqlens_cpu": row.cu_seqlens_cpu} if known else {}
