"""Which layers are captured, and how: forward hooks that see a decoder layer's raw output.

Tap i is HF hidden_states[i + 1] and vLLM/speculators aux id i + 1. The last layer is never a tap:
Transformers gives it after the final norm, servers before it or not at all.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.config import FeaturesConfig
from draftsmith.core import UserError


def auto_taps(num_layers: int, num_taps: int) -> list[int]:
    """z-lab's formula: evenly from layer 1 to layer N-3 (dflash/model.py, build_target_layer_ids)."""
    if num_taps == 1:
        return [num_layers // 2]
    first, last = 1, num_layers - 3
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


def resolve_taps(features: FeaturesConfig, num_layers: int) -> list[int]:
    """The taps of this configuration on a target of `num_layers`. Raises UserError when one cannot
    be captured.
    """
    where = "features.taps"
    if features.taps == "auto":
        taps = auto_taps(num_layers, features.num_taps)
        if len(set(taps)) != len(taps) or min(taps) < 0 or max(taps) > num_layers - 2:
            raise UserError(
                where="features.num_taps",
                found=f"{features.num_taps} taps for a target of {num_layers} layers, which "
                f"the formula puts at {taps}",
                expected="distinct layers below the last",
                remedy="Lower features.num_taps or list features.taps.",
            )
        return taps
    for tap in features.taps:
        if tap >= num_layers:
            raise UserError(
                where=where,
                found=f"tap {tap}",
                expected=f"layers 0 to {num_layers - 2}: the target has "
                f"{num_layers} layers, counted from 0",
                remedy="Correct features.taps.",
            )
        if tap == num_layers - 1:
            raise UserError(
                where=where,
                found=f"tap {tap}, the last layer",
                expected=f"layers 0 to {num_layers - 2}: "
                "servers do not give the last layer's raw output",
                remedy="Leave it out of features.taps.",
            )
    return list(features.taps)


def decoder_layers(decoder: nn.Module, where: str) -> nn.ModuleList:
    """The decoder's layers. Raises UserError for a model that has none to tap."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise UserError(
            where=where,
            found=f"{type(decoder).__name__}, which has no decoder layers to tap",
            expected="a decoder-only language model",
            remedy="Choose another target.model.",
        )
    return layers


@contextlib.contextmanager
def capture(decoder: nn.Module, layer_ids: list[int]) -> Iterator[dict[int, Tensor]]:
    """Hooks for the time of the block: after a forward, {layer: raw output [B, T, H]}."""
    seen: dict[int, Tensor] = {}

    def hook(layer_id: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            seen[layer_id] = output if torch.is_tensor(output) else output[0]

        return keep

    layers = decoder_layers(decoder, "target.model")
    handles = [layers[i].register_forward_hook(hook(i)) for i in layer_ids]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def stack_taps(seen: dict[int, Tensor], taps: list[int]) -> Tensor:
    """[B, T, taps, H] from what `capture` saw."""
    return torch.stack([seen[tap] for tap in taps], dim=2)
