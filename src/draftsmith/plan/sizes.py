"""How large target and drafter are, from the target's config.json alone: the networks are built on
torch's meta device, so any family that Transformers knows is counted exactly and no weight is read.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.config import RunConfig
from draftsmith.drafter.config import DrafterShape, resolve_shape
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import TargetInfo

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class TargetSizes:
    """Parameters and states of a target. `layers` and `active`: of each decoder layer, all and those
    that one token uses (experts differ). `head` is 0 when it is tied to the embedding.
    """

    hidden: int
    vocab: int
    embedding: int
    head: int
    layers: list[int]
    active: list[int]
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    attention_width: int
    num_full_layers: int
    widest_bytes_per_token: int

    @property
    def params(self) -> int:
        """All of them, but for the final norm."""
        return self.embedding + self.head + sum(self.layers)

    def cut_params(self, num_layers: int) -> int:
        """Embedding and the first layers: what extraction holds."""
        return self.embedding + sum(self.layers[:num_layers])

    def flops_per_token(self, num_layers: int, mean_length: float) -> float:
        """Of a forward through the first layers without lm_head, causal attention included."""
        full = self.num_full_layers * num_layers / len(self.layers)
        return 2.0 * sum(self.active[:num_layers]) + 2.0 * full * self.attention_width * mean_length


def target_sizes(cfg: RunConfig, element_bytes: int) -> TargetSizes:
    """Sizes of cfg.target, whose values take `element_bytes`."""
    top = AutoConfig.from_pretrained(cfg.target.model, revision=cfg.target.revision)
    config: Any = top.get_text_config(decoder=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    layers = list(model.get_decoder().layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    attending = [kind for kind in kinds if "attention" in kind and kind != "linear_attention"]
    linear = sum(kind == "linear_attention" for kind in kinds)
    return TargetSizes(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        embedding=embedding.numel(),
        head=0 if head is embedding or config.tie_word_embeddings else head.numel(),
        layers=[_count(layer) for layer in layers],
        active=[_count(layer, _experts_used(config)) for layer in layers],
        kv_bytes_per_token=len(attending) * 2 * kv_heads * head_dim * element_bytes,
        state_bytes_per_sequence=linear * _gdn_state(config, element_bytes),
        attention_width=heads * head_dim,
        num_full_layers=len(attending),
        widest_bytes_per_token=_widest(config, element_bytes),
    )


def drafter_params(shape: DrafterShape) -> tuple[int, int]:
    """Parameters of the drafter: of its layers, and of the fusion of the features."""
    with torch.device("meta"):
        drafter = DFlash(shape)
    layers = sum(_count(layer) for layer in drafter.layers)
    return layers, _count(drafter) - layers


def drafter_shape(cfg: RunConfig, info: TargetInfo, taps: list[int]) -> DrafterShape:
    """The drafter's shape without the target's tokenizer: which token is the mask changes no size."""
    nobody: Any = SimpleNamespace(eos_token_id=None, pad_token_id=None)
    any_mask = cfg.drafter.model_copy(update={"mask_token_id": 0})
    return resolve_shape(any_mask, info, taps, nobody, info.vocab_size)


def _count(module: nn.Module, experts_used: float = 1.0) -> int:
    total = 0.0
    for name, parameter in module.named_parameters():
        share = experts_used if re.search(r"\bexperts\b", name) else 1.0
        total += share * parameter.numel()
    return round(total)


def _experts_used(config: Any) -> float:
    """The share of the experts that a token goes through."""
    for name in EXPERTS:
        if getattr(config, name, None):
            return config.num_experts_per_tok / getattr(config, name)
    return 1.0


def _gdn_state(config: Any, element_bytes: int) -> int:
    """A sequence's state in a Gated DeltaNet layer, fp32, and its convolution's. Other linear layers
    (Mamba, short convolutions) hold little; they count as 0.
    """
    value_heads = getattr(config, "linear_num_value_heads", 0) or 0
    if not value_heads:
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * config.linear_conv_kernel_dim * element_bytes
    return values * config.linear_key_head_dim * 4 + conv


def _widest(config: Any, element_bytes: int) -> int:
    """Bytes a token of what is alive at once in the widest part of a layer, residual and normed input
    included: gate, up and their product in the MLP (of the experts that a token uses), or
    projections, convolution and outputs of a Gated DeltaNet mixer.
    """

    def value(name: str) -> int:
        return getattr(config, name, None) or 0

    inner = value("intermediate_size")
    if value("moe_intermediate_size"):
        inner = value("moe_intermediate_size") * value("num_experts_per_tok")
        inner += value("shared_expert_intermediate_size")
    keys = value("linear_num_key_heads") * value("linear_key_head_dim")
    values = value("linear_num_value_heads") * value("linear_value_head_dim")
    mixer = 2 * (2 * keys + values) + 3 * values
    return (max(3 * inner, mixer) + 2 * config.hidden_size) * element_bytes
