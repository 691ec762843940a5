"""Published drafters as ours: config.json in z-lab's layout or in speculators', and what in either a
server would read differently from the way the weights were trained.

z-lab: dflash_config.target_layer_ids are 0-based layers (our taps). speculators (0.9.0,
models/dflash): aux_hidden_state_layer_ids are one more; the transformer's keys stand in
transformer_layer_config, of Qwen3 or of Llama, whose defaults some versions leave out; the layers
are Qwen3's in both. For a target with multimodal RoPE it keeps mrope_section and turns the whole
head, which at text's positions is plain RoPE. Checked against the package: tests/checkpoints/speculators.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from transformers import AutoConfig

from draftsmith.core import UserError
from draftsmith.drafter.config import NO_WINDOW, DrafterShape

UNMODIFIED = "Use an unmodified DFlash checkpoint."
TARGETS_OWN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "t2d", "d2t")
"""Tensors that speculators saves along and that are the target's."""


def shape_from(
    config: dict[str, Any], where: str, num_target_layers: int | None = None
) -> DrafterShape:
    """The shape in a checkpoint's config.json. Raises UserError for what is no DFlash drafter, and
    for one that servers and draftsmith would read differently.
    """

    def refuse(found: str, expected: str, remedy: str = UNMODIFIED) -> NoReturn:
        raise UserError(where=where, found=found, expected=expected, remedy=remedy)

    kind = config.get("speculators_model_type")
    speculators = kind is not None
    nested = config if speculators else config.get("dflash_config")
    body = config.get("transformer_layer_config", {}) if speculators else config
    names = " ".join(config.get("architectures") or [])
    if not isinstance(nested, dict) or "DFlash2" in names or kind not in (None, "dflash"):
        of = f"speculators' {kind}, " if speculators else ""
        refuse(f"no DFlash configuration ({of}{names or 'no architectures'})", "a DFlash drafter")
    if speculators and config.get("sample_from_anchor"):
        remedy = "Train it with --no-sample-from-anchor."
        refuse("sample_from_anchor: true", "a drafter whose anchor predicts nothing", remedy)
    qwen3 = _transformer(body, speculators, refuse)
    if config.get("draft_vocab_size") not in (None, qwen3.vocab_size):
        refuse(
            f"draft_vocab_size {config['draft_vocab_size']}",
            f"the target's whole vocabulary, {qwen3.vocab_size}",
            "Train it without --draft-vocab-size.",
        )
    if qwen3.attention_bias or qwen3.hidden_act != "silu":
        refuse("attention biases or an activation other than silu", "z-lab's network")
    layers = num_target_layers or config.get("num_target_layers")
    if layers is None:
        refuse("no num_target_layers", "the target's number of layers")
    taps = _taps(config, nested, speculators, layers, refuse)
    if nested.get("mask_token_id") is None:
        refuse("no mask_token_id", "the token that fills a block")
    if not 0 <= nested["mask_token_id"] < qwen3.vocab_size:
        refuse(f"mask_token_id {nested['mask_token_id']}", f"an id below {qwen3.vocab_size}")
    block_size = nested.get("block_size", config.get("block_size"))
    if not isinstance(block_size, int) or block_size < 2:
        refuse(f"block_size {block_size}", "at least 2")
    full = ["full_attention"] * qwen3.num_hidden_layers
    return DrafterShape(
        hidden_size=qwen3.hidden_size,
        intermediate_size=qwen3.intermediate_size,
        num_layers=qwen3.num_hidden_layers,
        num_attention_heads=qwen3.num_attention_heads,
        num_key_value_heads=qwen3.num_key_value_heads or qwen3.num_attention_heads,
        head_dim=qwen3.head_dim,
        rms_norm_eps=qwen3.rms_norm_eps,
        rope_theta=float(qwen3.rope_parameters["rope_theta"]),
        max_position_embeddings=qwen3.max_position_embeddings,
        vocab_size=qwen3.vocab_size,
        layer_types=tuple(body.get("layer_types") or full),
        sliding_window=body.get("sliding_window") or NO_WINDOW,
        block_size=block_size,
        mask_token_id=nested["mask_token_id"],
        taps=tuple(taps),
        num_target_layers=layers,
        causal=_causal(config, nested, speculators),
    )


def _transformer(body: dict[str, Any], speculators: bool, refuse: Any) -> Any:
    """The transformer's configuration, with plain RoPE over the whole head."""
    kind = body.get("model_type", "qwen3") if speculators else "qwen3"
    if kind not in ("qwen3", "llama"):
        refuse(f"layers of model_type {kind}", "qwen3 or llama")
    left_out = ("architectures", "dtype", "model_type")
    body = {k: v for k, v in body.items() if k not in left_out}
    at = "rope_parameters" if body.get("rope_parameters") else "rope_scaling"
    rope = dict(body.get(at) or {})
    if "full_attention" in rope or "sliding_attention" in rope:
        refuse("rope_parameters of each layer type", "one RoPE for all layers")
    sections = rope.pop("mrope_section", None)
    if sections:
        body[at] = rope
    qwen3: Any = AutoConfig.for_model(kind, **body)
    rope = dict(qwen3.rope_parameters or {})
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    if not whole or (sections and not (speculators and 2 * sum(sections) == qwen3.head_dim)):
        found = {**rope, **({"mrope_section": sections} if sections else {})}
        refuse(f"rope_parameters {found}", "RoPE over the whole head: servers would turn a part")
    if rope.get("rope_type", "default") != "default":
        refuse(f"RoPE of type {rope['rope_type']}", "plain RoPE")
    return qwen3


def _taps(config: dict, nested: dict, speculators: bool, layers: int, refuse: Any) -> list[int]:
    key = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = nested.get(key)
    if not ids:
        refuse(f"no {key}", "the target's layers that feed the drafter")
    assert ids, "refuse() raises"
    taps = [i - 1 for i in ids] if speculators else list(ids)
    found = f"{key} {ids}" + (f", that is taps {taps}," if speculators else "")
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    if aux is not None and [i - 1 for i in aux] != taps:
        refuse(f"eagle_aux_hidden_state_layer_ids {aux} beside {found}", "one set of layers")
    other = "Use a drafter that reads other layers."
    if min(taps) < 0 or max(taps) > layers - 2:
        found += f" on a target of {layers} layers"
        refuse(found, f"layers below the last: taps 0 to {layers - 2}", other)
    if taps != sorted(set(taps)):
        refuse(found, "layers in ascending order, as servers hand them over", other)
    return taps


def _causal(config: dict, nested: dict, speculators: bool) -> bool | None:
    """vLLM's precedence: is_causal, then dflash_config.causal, then the layer's type."""
    if speculators:
        return False if config.get("sliding_window_non_causal") else None
    return config.get("is_causal", nested.get("causal"))


def drafters_own(names: Iterable[str]) -> list[str]:
    """The names that are the drafter's, without those that speculators copies from the target."""
    return [name for name in names if not name.startswith(TARGETS_OWN)]
