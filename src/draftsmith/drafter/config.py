"""The drafter's shape, and its config.json in z-lab's layout (the keys vLLM and SGLang read)."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.config import DrafterConfig
from draftsmith.core import UserError
from draftsmith.target.load import TargetInfo


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and their meaning."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int

    def window(self, layer: int) -> int | None:
        """The layer's window, or None when it is full. Sliding layers are also causal inside the
        block.
        """
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


def resolve_shape(
    cfg: DrafterConfig,
    target: TargetInfo,
    taps: list[int],
    tokenizer: PreTrainedTokenizerBase,
    num_embedding_rows: int,
) -> DrafterShape:
    """Fill in what the configuration leaves to the target. Raises UserError for shapes that do not
    fit.
    """
    like_target = target.head_dim in (64, 128)
    heads = target.num_attention_heads if like_target else 32
    kv_heads = target.num_key_value_heads if like_target else 8

    def pick(value: Any, default: int) -> int:
        return default if value == "auto" else int(value)

    shape = DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=pick(cfg.intermediate_size, target.intermediate_size),
        num_layers=cfg.layers,
        num_attention_heads=pick(cfg.num_attention_heads, heads),
        num_key_value_heads=pick(cfg.num_key_value_heads, kv_heads),
        head_dim=pick(cfg.head_dim, target.head_dim if like_target else 128),
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        layer_types=("full_attention",) * cfg.layers
        if cfg.layer_types == "auto"
        else tuple(cfg.layer_types),
        sliding_window=cfg.sliding_window,
        block_size=cfg.block_size,
        mask_token_id=_mask_token(cfg, tokenizer, num_embedding_rows),
        taps=tuple(taps),
        num_target_layers=target.num_layers,
    )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise UserError(
            where="drafter.num_attention_heads",
            found=f"{shape.num_attention_heads} heads for {shape.num_key_value_heads} KV heads",
            expected="a multiple",
            remedy="Set both heads.",
        )
    if shape.head_dim % 2:
        raise UserError(
            where="drafter.head_dim",
            found=str(shape.head_dim),
            expected="an even number (RoPE pairs dims)",
            remedy="Set drafter.head_dim.",
        )
    return shape


def _mask_token(cfg: DrafterConfig, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> int:
    """A row of the target's embedding that no text uses: a free one, else an unused special token;
    never pad or EOS.
    """
    if cfg.mask_token_id != "auto":
        if cfg.mask_token_id >= num_rows:
            raise UserError(
                where="drafter.mask_token_id",
                found=str(cfg.mask_token_id),
                expected=f"a row of the target's embedding, 0 to {num_rows - 1}",
                remedy="Correct it or use auto.",
            )
        if cfg.mask_token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            raise UserError(
                where="drafter.mask_token_id",
                found=f"{cfg.mask_token_id}, the tokenizer's pad or end token",
                expected="a token that never occurs in text",
                remedy="Use auto, or another token.",
            )
        return cfg.mask_token_id
    first_free = max(tokenizer.get_vocab().values()) + 1
    if first_free < num_rows:
        return first_free
    names = ("eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id")
    taken = [getattr(tokenizer, name) for name in names]
    template = str(tokenizer.chat_template)
    free = [
        i
        for i, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and i not in taken and i < num_rows and token.content not in template
    ]
    if not free:
        raise UserError(
            where="drafter.mask_token_id",
            found="auto, and a target without a free embedding row or an unused special token",
            expected="a token that never occurs in text",
            remedy="Set drafter.mask_token_id.",
        )
    return free[-1]


def zlab_config(shape: DrafterShape, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json as z-lab's checkpoints have it: block_size on top and nested, full RoPE, no
    auto_map, no eagle ids.
    """
    sliding = "sliding_attention" in shape.layer_types
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.taps),
        },
        "dtype": dtype,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": list(shape.layer_types),
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_target_layers": shape.num_target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "sliding_window": shape.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def shape_from_zlab(config: dict[str, Any]) -> DrafterShape:
    """The inverse of `zlab_config`, for a checkpoint's config.json."""
    nested = config["dflash_config"]
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        max_position_embeddings=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        layer_types=tuple(config["layer_types"]),
        sliding_window=config["sliding_window"] or DrafterConfig().sliding_window,
        block_size=nested.get("block_size", config.get("block_size")),
        mask_token_id=nested["mask_token_id"],
        taps=tuple(nested["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
    )
