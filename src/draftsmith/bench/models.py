"""Targets with random weights of any configuration, made where they will run: speed does not depend on
what the weights say.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.core import UserError
from draftsmith.drafter.config import NO_WINDOW, DrafterShape

QWEN3_6_27B: dict[str, Any] = {  # text_config of Qwen/Qwen3.6-27B
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
BUILT_IN = {"qwen3.6-27b": ([1, 16, 31, 46, 61], QWEN3_6_27B)}


def config_of(name: str) -> Any:
    """The text configuration of a built-in name, a config.json, or a model's folder or hub id."""
    if name in BUILT_IN:
        return transformers.Qwen3_5TextConfig(**BUILT_IN[name][1])
    path = Path(name)
    if path.suffix == ".json" and path.exists():
        text = json.loads(path.read_text())
        return AutoConfig.for_model(**text).get_text_config(decoder=True)
    try:
        return AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise UserError(
            where="--model",
            found=f"{name!r} ({' '.join(str(error).split())[:120]})",
            expected=f"a model, a config.json, or one of {', '.join(BUILT_IN)}",
            remedy="Check the name.",
        ) from None


def random_target(config: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM of this configuration with random weights, built on the device itself."""
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rotary = {name: module for name, module in model.named_modules() if name.endswith("rotary_emb")}
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        _fill(name, weight, generator)
    for name, module in rotary.items():  # inv_freq is no parameter and stays empty
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, type(module)(config).to(device))
    return model


def drafter_shape(config: Any, taps: list[int], layers: int, block_size: int) -> DrafterShape:
    """Of a drafter for this target, as `train` would choose it."""
    like = config.head_dim in (64, 128)
    return DrafterShape(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_layers=layers, num_attention_heads=config.num_attention_heads if like else 32,
        num_key_value_heads=config.num_key_value_heads if like else 8,
        head_dim=config.head_dim if like else 128, rms_norm_eps=1e-6, rope_theta=1e7,
        max_position_embeddings=config.max_position_embeddings, vocab_size=config.vocab_size,
        layer_types=("full_attention",) * layers, sliding_window=NO_WINDOW, block_size=block_size,
        mask_token_id=1, taps=tuple(taps), num_target_layers=config.num_hidden_layers,
    )  # fmt: skip


def _fill(name: str, weight: Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):  # decays from slow to fast, as trained ones
        weight.uniform_(0.01, 16, generator=generator).log_()
    elif weight.ndim == 1:
        weight.fill_(0.0 if "norm" in name else 1.0)
    else:
        weight.normal_(0, 0.02, generator=generator)
