"""Our own Gated DeltaNet step: exact in the model's dtype, the same for one token and for a block,
with every state kept.

Transformers' fallback rounds to fp32 and uses another algorithm for a block than for a token, and
no version of it can go back. Here both loops (autoregressive and speculative) run this one
recurrence, and a rejected draft is undone by taking the state after the last accepted token.

Per head, state S [K, V] (arXiv:2412.06464; transformers qwen3_5/modeling_qwen3_5.py,
torch_recurrent_gated_delta_rule), q and k L2-normalised, q scaled by K^-0.5:

    u_t = beta_t (v_t - e^{g_t} S^T k_t);   S <- e^{g_t} S + k_t u_t^T;   o_t = S^T q_t

Shapes: B batch, T tokens, H value heads, K/V head dims, D channels, W taps of the convolution.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_CONV = "causal_conv1d_fn"
SHORT = 32  # tokens up to which our convolution is the faster one on a CPU


def is_gdn(decoder: nn.Module) -> bool:
    """Whether this decoder has Gated DeltaNet layers that this module can step."""
    return hasattr(importlib.import_module(type(decoder).__module__), _FUNCTIONS[1])


def gdn_steps(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    *,
    keep_states: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] and the states after each token [T, B, H, K, V], or with
    keep_states=False only the last [1, B, H, K, V], which is then `state_BHKV` itself, overwritten.
    q and k may have fewer heads than v.
    """
    dtype = torch.promote_types(v_BTHV.dtype, torch.float32)
    B, T, H, V = v_BTHV.shape
    K = k_BTHK.shape[-1]
    q, k = (
        _l2norm(x.to(dtype)).repeat_interleave(H // x.shape[2], dim=2) for x in (q_BTHK, k_BTHK)
    )
    q = q * K**-0.5
    v, beta, decay = v_BTHV.to(dtype), beta_BTH.to(dtype), g_BTH.to(dtype).exp()
    kq = torch.stack([k, q], dim=-2).transpose(0, 1).reshape(T, B * H, 2, K)
    v, k_col = (x.transpose(0, 1).reshape(T, B * H, 1, -1) for x in (v, k))
    beta, decay = (x.transpose(0, 1).reshape(T, B * H, 1, 1) for x in (beta, decay))
    k_col, dot = k_col.transpose(-1, -2), (q * k).sum(-1).transpose(0, 1).reshape(T, B * H, 1, 1)
    state = state_BHKV.to(dtype).view(B * H, K, V)
    states = state.new_empty(T if keep_states else 1, B * H, K, V) if keep_states else state[None]
    out = state.new_empty(T, B * H, 1, V)
    for t in range(T):
        memory = kq[t] @ state * decay[t]
        u = beta[t] * (v[t] - memory[:, :1])
        state = torch.mul(state, decay[t], out=states[t if keep_states else 0])
        state.baddbmm_(k_col[t], u)
        torch.add(memory[:, 1:], dot[t] * u, out=out[t])
    return out.view(T, B, H, V).transpose(0, 1), states.view(-1, B, H, K, V)


def _l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def conv_steps(
    x_BDT: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Depthwise causal convolution of a short block with its history in front, weight [D, W], like
    the library's. On a CPU the library's costs more for a few tokens than the rest of the layer.
    """
    taps = weight.shape[-1]
    windows = F.pad(x_BDT, (taps - 1, 0)).unfold(-1, taps, 1)
    y = (windows * weight[:, None]).sum(-1)
    y = y if bias is None else y + bias[:, None]
    assert activation in (None, "silu", "swish"), f"unknown convolution activation {activation}"
    return y if activation is None else F.silu(y)


@contextlib.contextmanager
def own_steps(decoder: nn.Module, tape: list[Tensor] | None) -> Iterator[None]:
    """For the time of the block, every cached forward of this model's GDN layers runs `gdn_steps`.

    With a tape, the states after each token [T, B, H, K, V] are appended to it, layer by layer.
    Without one, the cache's state is overwritten in place. A prefill (no state yet) keeps the
    library's own kernel.
    """
    module = importlib.import_module(type(decoder).__module__)
    originals = {
        name: getattr(module, name) for name in (*_FUNCTIONS, _CONV) if hasattr(module, name)
    }
    if _FUNCTIONS[1] not in originals:
        yield
        return

    def step(original: Any) -> Any:
        def rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor | None = None,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            if initial_state is None:
                return original(query, key, value, g=g, beta=beta, initial_state=None, **kwargs)
            assert kwargs.get("use_qk_l2norm_in_kernel", False), (
                "every GDN family normalises q and k in the kernel"
            )
            out, states = gdn_steps(
                query, key, value, g, beta, initial_state, keep_states=tape is not None
            )
            if tape is not None:
                tape.append(states)
            return out.to(query.dtype), states[-1]

        return rule

    def conv(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        short = x.device.type == "cpu" and x.shape[-1] <= SHORT
        return conv_steps(x, *args, **kwargs) if short else originals[_CONV](x, *args, **kwargs)

    for name in _FUNCTIONS:
        setattr(module, name, step(originals[name]))
    setattr(module, _CONV, conv)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
