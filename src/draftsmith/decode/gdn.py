"""Our own Gated DeltaNet step: exact in the model's dtype, for one token, a chain or a tree, without
touching the state until a path is accepted.

Transformers' fallback rounds to fp32 and uses another algorithm for a block than for a token, and
no version of it can go back. Here a block leaves a stash from which any accepted path is folded
into the state; a rejected token leaves no trace.

Per head, state S [K, V] (arXiv:2412.06464; transformers qwen3_5/modeling_qwen3_5.py,
torch_recurrent_gated_delta_rule), q and k L2-normalised, q scaled by K^-0.5:

    u_t = beta_t (v_t - e^{g_t} S^T k_t);   S <- e^{g_t} S + k_t u_t^T;   o_t = S^T q_t

Shapes: B batch, T tokens or nodes, H value heads, Hk key heads, K/V head dims, D channels, W taps of
the convolution.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
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


def gdn_step(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
) -> Tensor:
    """One token (T = 1): its output [B, 1, H, V]; the state is advanced in place."""
    assert v_BTHV.shape[1] == 1, "one token; gdn_block takes more"
    dtype = torch.promote_types(v_BTHV.dtype, torch.float32)
    H = v_BTHV.shape[2]
    k, q = _repeat(_keys(k_BTHK, dtype), H), _repeat(_queries(q_BTHK, dtype), H)
    v = v_BTHV.to(dtype).transpose(1, 2)
    decay, beta = (x.to(dtype).transpose(1, 2)[..., None] for x in (g_BTH, beta_BTH))
    decay = decay.exp()
    memory = torch.cat([k, q], dim=2) @ state_BHKV * decay
    u = beta * (v - memory[:, :, :1])
    state_BHKV.mul_(decay).add_(k.transpose(-1, -2) @ u)
    out = memory[:, :, 1:] + (q * k).sum(-1, keepdim=True) * u
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Stash:
    """What folds any path of a block into the state: k [B, Hk, T, K], u [B, H, T, V], and the log
    decay from the root through each node [B, H, T]. A state a node would be K times larger.
    """

    k: Tensor
    u: Tensor
    log_decay: Tensor

    def fold(self, state_BHKV: Tensor, path: Tensor) -> None:
        """Advance the state in place over these nodes (int64), root first: S <- e^{G_leaf} S + sum_j
        e^{G_leaf - G_j} k_j u_j^T.
        """
        index = path.to(self.u.device)
        kernels = _kernels(state_BHKV)
        if kernels is not None and kernels.fits(self.k, self.u.transpose(1, 2), state_BHKV):
            kernels.fold(state_BHKV, self.k, self.u, self.log_decay, index)
            return
        along = self.log_decay.index_select(2, index)
        leaf = along[..., -1:]
        k = _repeat(self.k.index_select(2, index), self.u.shape[1])
        k = k * (leaf - along).exp()[..., None]
        u = self.u.index_select(2, index)
        state_BHKV.mul_(leaf.exp()[..., None]).add_(k.transpose(-1, -2) @ u)

    def fold_each(self, state_BHKV: Tensor, length_B: Tensor) -> None:
        """The same of a chain, of which each row keeps its own first tokens (one at least)."""
        decay = self.log_decay  # [B, H, T]
        at = (length_B - 1)[:, None, None].expand(-1, decay.shape[1], 1)
        leaf = decay.gather(2, at)
        kept = torch.arange(decay.shape[2], device=decay.device) < length_B[:, None, None]
        weight = (leaf - decay).masked_fill(~kept, float("-inf")).exp()
        k = _repeat(self.k, self.u.shape[1]) * weight[..., None]
        state_BHKV.mul_(leaf.exp()[..., None]).add_(k.transpose(-1, -2) @ self.u)


def gdn_block(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    seen_TT: Tensor,
) -> tuple[Tensor, Stash]:
    """Outputs [B, T, H, V] of a chain or a tree of tokens; the state is not touched. `seen` [T, T]
    is True at a node and its ancestors; parents come before children.

    With G the log decay from the root and D_ij = e^{G_i - G_j} where j is i or an ancestor, else 0:
    (I + beta (K K^T) . D, below the diagonal) U = beta (V - e^G K S);  O = e^G Q S + ((Q K^T) . D) U
    (the WY form of arXiv:2412.06464 with ancestors in place of predecessors). On a GPU with Triton one
    kernel, gdn_triton.py.
    """
    kernels = _kernels(state_BHKV)
    if kernels is not None and kernels.fits(q_BTHK, v_BTHV, state_BHKV):
        inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
        out, *kept = kernels.block(*inputs, state_BHKV, seen_TT)
        return out, Stash(*kept)
    dtype = torch.promote_types(v_BTHV.dtype, torch.float32)
    H = v_BTHV.shape[2]
    few = _keys(k_BTHK, dtype)
    k, q = _repeat(few, H), _repeat(_queries(q_BTHK, dtype), H)
    v, beta = v_BTHV.to(dtype).transpose(1, 2), beta_BTH.to(dtype).transpose(1, 2)[..., None]
    log_decay = (seen_TT.to(dtype) @ g_BTH.to(dtype)).transpose(1, 2)
    gap = log_decay[..., :, None] - log_decay[..., None, :]
    decay = gap.masked_fill(~seen_TT, float("-inf")).exp()  # masked first: no factor exceeds 1
    start = log_decay.exp()[..., None]
    system = (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    right = beta * (v - start * (k @ state_BHKV))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = start * (q @ state_BHKV) + ((q @ k.transpose(-1, -2)) * decay) @ u
    return out.transpose(1, 2), Stash(few, u, log_decay)


def _kernels(state: Tensor) -> Any:
    """The Triton module where it can run."""
    if state.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from draftsmith.decode import gdn_triton

    return gdn_triton


def _keys(x_BTHK: Tensor, dtype: torch.dtype, eps: float = 1e-6) -> Tensor:
    """[B, Hk, T, K], L2-normalised."""
    x = x_BTHK.to(dtype).transpose(1, 2)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _queries(x_BTHK: Tensor, dtype: torch.dtype) -> Tensor:
    return _keys(x_BTHK, dtype) * x_BTHK.shape[-1] ** -0.5


def _repeat(x_BHTK: Tensor, num_heads: int) -> Tensor:
    return x_BHTK.repeat_interleave(num_heads // x_BHTK.shape[1], dim=1)


@dataclass
class Block:
    """The nodes that a forward runs over: parents (-1 for the root, each before its children), who
    sees whom [T, T], and the stashes of the layers as they come.
    """

    parents: list[int]
    seen: Tensor
    stashes: list[Stash]

    @classmethod
    def of(cls, parents: list[int], device: torch.device) -> "Block":
        """A chain is parents -1, 0, 1, ..."""
        rows = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            assert -1 <= parent < node, "parents come before children"
            if parent >= 0:
                rows[node] |= rows[parent]
        return cls(parents, rows.to(device), [])

    @property
    def depths(self) -> list[int]:
        """Nodes above each node."""
        return [int(n) - 1 for n in self.seen.sum(-1).tolist()]

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the node before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def window(self, num_history: int, taps: int) -> Tensor:
        """[T, W]: the inputs that a causal convolution of W taps sees at each node, itself last:
        ancestors, then the history's end. Positions count from the history's start.
        """
        rows = []
        for node in range(len(self.parents)):
            line = []
            while node >= 0:
                line.append(num_history + node)
                node = self.parents[node]
            line += range(num_history - 1, num_history - 1 - taps, -1)
            rows.append(line[:taps][::-1])
        return torch.tensor(rows)


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
    windows = F.pad(x_BDT, (weight.shape[-1] - 1, 0)).unfold(-1, weight.shape[-1], 1)
    return _convolve(windows, weight, bias, activation)


def _convolve(
    windows_BDTW: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    y = (windows_BDTW * weight[:, None]).sum(-1)
    y = y if bias is None else y + bias[:, None]
    assert activation in (None, "silu", "swish"), f"unknown convolution activation {activation}"
    return y if activation is None else F.silu(y)


def conv_tree(
    x_BDT: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, block: Block
) -> Tensor:
    """The same over a tree: history in front, then the nodes, whose taps walk their ancestors. The
    history's own outputs are left as zeros, since nobody reads them.
    """
    T, taps = len(block.parents), weight.shape[-1]
    history = x_BDT.shape[-1] - T
    padded = F.pad(x_BDT, (taps, 0))  # a history shorter than the taps counts as zeros
    index = block.window(history + taps, taps).to(x_BDT.device)
    y = _convolve(padded[..., index], weight, bias, activation)
    return F.pad(y, (history, 0))


@contextlib.contextmanager
def own_steps(decoder: nn.Module, block: Block | None) -> Iterator[None]:
    """For the time of the `with`, every cached forward of this model's GDN layers runs the rule
    above.

    With a block of several nodes, the states stay and a stash a layer is added to it. Without one,
    or with a single node, the cache's state is advanced in place. A prefill (no state yet) keeps
    the library's own kernel.
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
            if value.shape[1] == 1:
                out = gdn_step(query, key, value, g, beta, initial_state)
            else:
                assert block is not None, "several tokens at once are a block to be committed"
                out, stash = gdn_block(query, key, value, g, beta, initial_state, block.seen)
                block.stashes.append(stash)
            return out.to(query.dtype), initial_state

        return rule

    def conv(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **kwargs: Any
    ) -> Tensor:
        if block is not None and not block.is_chain:
            return conv_tree(x, weight, bias, activation, block)
        short = x.device.type == "cpu" and x.shape[-1] <= SHORT
        chosen = conv_steps if short else originals[_CONV]
        return chosen(x, weight, bias, activation=activation, **kwargs)

    for name in _FUNCTIONS:
        setattr(module, name, step(originals[name]))
    setattr(module, _CONV, conv)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
