"""The drafter's shape, and its config.json in z-lab's layout (the keys vLLM and SGLang read)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.config import DrafterConfig
from draftsmith.core import UserError
from draftsmith.target.load import TargetInfo

NO_WINDOW = 2048


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
    causal: bool | None = None
    """Inside the block. None, as servers read it: sliding layers are causal, full ones are not."""

    def window(self, kind: str) -> int | None:
        """The window of this layer type, or None when it is full."""
        return self.sliding_window if kind == "sliding_attention" else None

    def is_causal(self, kind: str) -> bool:
        """Whether a slot of this layer type sees only the slots before it."""
        return kind == "sliding_attention" if self.causal is None else self.causal


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

    types = (
        ("full_attention",) * cfg.layers if cfg.layer_types == "auto" else tuple(cfg.layer_types)
    )

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
        layer_types=types,
        # a checkpoint without sliding layers names no window
        sliding_window=cfg.sliding_window if "sliding_attention" in types else NO_WINDOW,
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


def check_belongs(shape: DrafterShape, target: TargetInfo, where: str) -> None:
    """Raise UserError when this drafter is another target's."""
    wrong = {
        name: (getattr(shape, name), its)
        for name, its in {
            "hidden_size": target.hidden_size,
            "num_target_layers": target.num_layers,
            "vocab_size": target.vocab_size,
        }.items()
        if getattr(shape, name) != its
    }
    if wrong:
        raise UserError(
            where=where,
            found=", ".join(f"{name} {mine}" for name, (mine, _) in wrong.items()),
            expected=", ".join(f"{name} {its}" for name, (_, its) in wrong.items())
            + f", as the target {target.name}",
            remedy="Use a drafter that was made for this target.",
        )


def check_tokenizer(path: Path, shape: DrafterShape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError when this drafter was made for another tokenizer: its mask token is one that
    texts of this one use, or another tokenizer lies beside it.
    """
    if shape.mask_token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        found = f"mask_token_id {shape.mask_token_id}, the target's pad or end token"
    elif (beside := path / "tokenizer.json").exists() and (
        PreTrainedTokenizerFast(tokenizer_file=str(beside)).get_vocab() != tokenizer.get_vocab()
    ):
        found = "a tokenizer.json with another vocabulary than the target's"
    else:
        return
    raise UserError(
        where=str(path),
        found=found,
        expected="a drafter made with the target's tokenizer",
        remedy="Use a drafter that was made for this target.",
    )


def warm_shape(cfg: DrafterConfig, published: DrafterShape, taps: list[int]) -> DrafterShape:
    """The shape of a warm start: the checkpoint's, which the configuration must not contradict. The
    block may be smaller: drafters serve smaller blocks than they were trained on.
    """
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    asked: dict[str, tuple[Any, Any]] = {
        "features.taps": (tuple(taps), published.taps),
        "drafter.layers": (cfg.layers, published.num_layers),
        "drafter.mask_token_id": (cfg.mask_token_id, published.mask_token_id),
        **{f"drafter.{name}": (getattr(cfg, name), getattr(published, name)) for name in names},
    }
    if cfg.layer_types != "auto":
        asked["drafter.layer_types"] = (tuple(cfg.layer_types), published.layer_types)
    wrong = {key: pair for key, pair in asked.items() if pair[0] not in ("auto", pair[1])}
    if wrong:
        raise UserError(
            where=", ".join(wrong),
            found=", ".join(str(mine) for mine, _ in wrong.values()),
            expected=", ".join(str(its) for _, its in wrong.values())
            + f", as in drafter.init_from {cfg.init_from}",
            remedy="Set these keys to the checkpoint's values.",
        )
    return replace(published, block_size=cfg.block_size)


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
    # vLLM and the package dflash each read their own key; unset, sliding layers are causal
    causal = {} if shape.causal is None else {"causal": shape.causal}
    is_causal = {} if shape.causal is None else {"is_causal": shape.causal}
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
            **causal,
        },
        **is_causal,
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
