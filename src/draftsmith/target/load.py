"""Loading the target and its tokenizer through Transformers, from the hub or a folder; VLM
checkpoints as text models.
"""

import hashlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from draftsmith.config import TargetConfig
from draftsmith.core import UserError
from draftsmith.files import digest
from draftsmith.target.taps import decoder_layers

FINAL_NORMS = ("norm", "final_layernorm", "embedding_norm", "final_norm", "norm_f")


@dataclass(frozen=True)
class TargetInfo:
    """What is known of the target before its weights are loaded."""

    name: str
    revision: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    weights_digest: str

    def identity(self) -> dict[str, Any]:
        """What names this target in manifests; a store or drafter of another one is refused."""
        return {
            "model": self.name,
            "revision": self.revision,
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "weights_digest": self.weights_digest,
        }


def device_of(target: TargetConfig) -> torch.device:
    """The device of this configuration."""
    if target.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            where="target.device",
            found="cuda, and no GPU here",
            expected="auto or cpu",
            remedy="Set target.device, or check the driver with nvidia-smi.",
        )
    if target.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(target.device)


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def inspect_target(target: TargetConfig) -> TargetInfo:
    """Read the configuration alone. Raises UserError when there is no such model or it has no
    decoder layers.
    """
    config = _guarded(
        target, lambda: AutoConfig.from_pretrained(target.model, revision=target.revision)
    )
    text = _text_config(config)
    if not getattr(text, "num_hidden_layers", None) or getattr(text, "is_encoder_decoder", False):
        raise UserError(
            where="target.model",
            found=f"{target.model} ({config.model_type}), which has no decoder layers to tap",
            expected="a decoder-only language model",
            remedy="Choose another target.model.",
        )
    heads = getattr(text, "num_attention_heads", None) or 1
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return TargetInfo(
        name=str(target.model),
        revision=target.revision,
        model_type=text.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
        rope_theta=float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0),
        max_position_embeddings=getattr(text, "max_position_embeddings", 0) or 0,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        weights_digest=_weights_digest(target, config),
    )


def check_ids(largest: int, info: TargetInfo, where: str) -> None:
    """Raise UserError for a token that the target has no embedding row for."""
    if largest >= info.vocab_size:
        raise UserError(
            where=where,
            found=f"token {largest}",
            expected=f"ids below {info.vocab_size}, the rows of the target's embedding",
            remedy="Use the target's own tokenizer.",
        )


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer; it must have a chat template and an end-of-sequence token."""
    tokenizer = _guarded(
        target, lambda: AutoTokenizer.from_pretrained(target.model, revision=target.revision)
    )
    if not tokenizer.chat_template:
        raise UserError(
            where="target.model",
            found=f"{target.model}, whose tokenizer has no chat template",
            expected="a chat model",
            remedy="Add chat_template.jinja to a local copy of the model.",
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            where="target.model",
            found=f"{target.model}, whose tokenizer has no eos token",
            expected="a token that ends an answer",
            remedy="Set eos_token in a local copy of the tokenizer.",
        )
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of vocabulary, merges and chat template: two equal ones tokenize alike."""
    parts = [
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    ]
    parts.append(str(tokenizer.chat_template))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load_outside(target: TargetConfig) -> PreTrainedModel:
    """The target with its first layer alone: embedding, final norm and lm_head for the drafter, without
    the memory of the whole.
    """
    config = _guarded(
        target, lambda: AutoConfig.from_pretrained(target.model, revision=target.revision)
    )
    text = _text_config(config)
    if getattr(text, "hidden_size_per_layer_input", None):
        return load_target(target)  # one tensor holds a part for every layer
    count = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count > 1:  # something for each layer
            setattr(text, name, value[:1])
    text.num_hidden_layers = 1
    return load_target(target, config=config)


def load_target(
    target: TargetConfig, *, dtype: torch.dtype | None = None, config: Any = None
) -> PreTrainedModel:
    """The target with its lm_head, frozen, in eval mode, on its device or devices. `config`: in place of
    its own.
    """
    dtype = dtype or getattr(torch, target.dtype)
    device = device_of(target)
    placement = _placement(target, device)
    hf_logging.disable_progress_bar()
    if device.type == "cpu":
        hf_logging.set_verbosity_error()  # it would advise kernels that need a GPU
    model, info = _guarded(
        target,
        lambda: AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=target.revision,
            dtype=dtype,
            output_loading_info=True,
            **({} if config is None else {"config": config}),
            **placement,
        ),
    )
    if info["missing_keys"]:  # Transformers would go on with random ones
        raise UserError(
            where="target.model",
            found=f"{target.model} without {sorted(info['missing_keys'])[:3]} "
            f"({len(info['missing_keys'])} tensors missing)",
            expected="all weights",
            remedy="Copy or download the model again.",
        )
    fla = sys.modules.get("fla")  # imported by the family's code, just now
    if device.type == "cpu" and fla is not None and config is None:  # a part of it is never called
        raise UserError(
            where="target.device",
            found="a model on the CPU, and flash-linear-attention in this environment: Transformers would "
            "call its GPU kernels on CPU tensors",
            expected="target.device: cuda, or an environment without it",
            remedy="Set target.device: cuda, or pip uninstall fla-core.",
        )
    model = model if placement else model.to(device)
    return model.eval().requires_grad_(False)


def _placement(target: TargetConfig, device: torch.device) -> dict[str, Any]:
    """How Transformers places weights while it reads them: with accelerate straight from the files to
    the GPU, or over several; without, through this process's memory (a copy a process).
    """
    if device.type == "cpu":
        return {}
    if importlib.util.find_spec("accelerate") is not None:
        mine = {"": torch.cuda.current_device()}  # a rank's own
        return {"device_map": mine if target.gpus_per_replica == 1 else "balanced"}
    if target.gpus_per_replica > 1:
        raise UserError(
            where="target.gpus_per_replica",
            found=f"{target.gpus_per_replica}, and no accelerate",
            expected="the library that places a model on several GPUs",
            remedy="pip install 'draftsmith[gpu]'",
        )
    print("the weights go through host memory; pip install 'draftsmith[gpu]' spares it", flush=True)
    return {}


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """The stack of decoder layers inside a causal LM, without its head."""
    decoder = model.get_decoder()
    decoder_layers(decoder, "target.model")
    return decoder


def cut_after(decoder: nn.Module, num_layers: int) -> None:
    """Drop the layers from `num_layers` on and the final norm, in place: last_hidden_state is then
    layer output, raw.
    """
    decoder.layers = decoder_layers(decoder, "target.model")[:num_layers]
    decoder.norm = nn.Identity()


def eos_ids(tokenizer: PreTrainedTokenizerBase, target: TargetConfig) -> list[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's."""
    missing_is_fine = {"_raise_exceptions_for_missing_entries": False}

    def load() -> Any:
        path = cached_file(
            target.model, "generation_config.json", revision=target.revision, **missing_is_fine
        )
        if path is not None:  # a broken one is an error, not a reason to take other ids
            return json.loads(Path(path).read_text()).get("eos_token_id")
        config = AutoConfig.from_pretrained(target.model, revision=target.revision)
        return getattr(_text_config(config), "eos_token_id", None)

    ids = _guarded(target, load)
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def unembed(model: PreTrainedModel) -> tuple[Tensor, Tensor, float]:
    """The frozen embedding [V, H], lm_head weight [V, H] and the final logits' soft cap (0: none)."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal LM has output embeddings"
    if getattr(head, "bias", None) is not None:
        raise UserError(
            where="target.model",
            found="an lm_head with a bias",
            expected="one without: servers share its weight alone with the drafter",
            remedy="Choose another target.model.",
        )
    cap = getattr(_text_config(model.config), "final_logit_softcapping", None) or 0.0
    embedding: Any = model.get_input_embeddings()
    return embedding.weight, head.weight, float(cap)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the lm_head."""
    decoder = text_decoder(model)
    for name in FINAL_NORMS:
        found = getattr(decoder, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UserError(
        where="train.loss",
        found=f"a target of type {model.config.model_type}, whose final norm is none of {FINAL_NORMS}",
        expected="one that is known",
        remedy="Use train.loss: ce.",
    )


def _weights_digest(target: TargetConfig, config: Any) -> str:
    """A hub model is named by its commit; a local folder by its config and the names, sizes and
    headers of its weights.
    """
    folder = Path(target.model)
    if not folder.is_dir():
        return getattr(config, "_commit_hash", None) or target.revision
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    ends = folder / "generation_config.json"
    return digest(
        [config.to_json_string(), ends.read_text() if ends.exists() else None]
        + [[file.name, file.stat().st_size, _sampled_digest(file)] for file in files]
    )


def _sampled_digest(path: Path, sample_bytes: int = 1 << 16) -> str:
    """Digest of 64 evenly spaced 64 KiB pieces: another fine-tune of the same shape shows, at no
    cost worth naming.
    """
    size, out = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        for i in range(64):
            file.seek(i * max(size - sample_bytes, 0) // 63)
            out.update(file.read(sample_bytes))
    return out.hexdigest()


def _guarded(target: TargetConfig, load: Any) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            where="target.model",
            found=f"{target.model!r}, which does not load ({' '.join(str(error).split())[:300]})",
            expected="a hub id or a folder that Transformers loads as a causal language model",
            remedy="Check the path or id, the revision, and the Transformers version.",
        ) from error
