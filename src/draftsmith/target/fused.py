"""The small functions between a decoder's matrix products, compiled: norms, gated norms, MLPs, rotary
embeddings. Eager, they were a quarter of a 27B hybrid's GPU time; compiled in seconds, they are a few
percent. Whole layers take minutes to compile and gain little more.

The compiled functions stand in their classes' place for the time of a forward only.
"""

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = re.compile(r"RMSNorm(Gated)?$|MLP$")
FUNCTIONS = ("apply_rotary_pos_emb",)
RECOMPILES = 64  # row shapes times classes; the default of 8 would fall back to eager

_compiled: dict[tuple[str, str], Callable[..., Any]] = {}


@contextlib.contextmanager
def fused(decoder: nn.Module) -> Iterator[None]:
    """For the time of the block, this decoder's small functions run compiled."""
    module = importlib.import_module(type(decoder).__module__)
    restore: list[tuple[Any, str, Any]] = []
    for holder, name, key in _small(module):
        original = getattr(holder, name)
        restore.append((holder, name, original))
        setattr(holder, name, _compile(key, original))
    try:
        yield
    finally:
        for holder, name, original in restore:
            setattr(holder, name, original)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A small function, compiled once for each shape of its tensors."""
    return _compile((function.__module__, function.__name__), function)


def normed_apart(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [1, T, Hk, K] with L2 norm 1 a head, v [1, T, H, V], each contiguous: they are parts of one
    projection, fla's kernels want them whole, and eager strided copies run at a third of the rate.
    """
    return (compiled(_normed_apart) if q.is_cuda else _normed_apart)(q, k, v)


def _normed_apart(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def unit(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return unit(q).contiguous(), unit(k).contiguous(), v.contiguous()


def _small(module: Any) -> list[tuple[Any, str, tuple[str, str]]]:
    """(holder, attribute, key) of each function to compile in a modeling module."""
    out: list[tuple[Any, str, tuple[str, str]]] = []
    for name, found in vars(module).items():
        own = inspect.isclass(found) and found.__module__ == module.__name__
        if own and issubclass(found, nn.Module) and CLASSES.search(name) and "Vision" not in name:
            out.append((found, "forward", (module.__name__, name)))
    out += [(module, name, (module.__name__, name)) for name in FUNCTIONS if hasattr(module, name)]
    return out


def _compile(key: tuple[str, str], original: Callable[..., Any]) -> Callable[..., Any]:
    if key not in _compiled:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
        _compiled[key] = torch.compile(original, dynamic=False)
    return _compiled[key]
