"""The target's own MTP head as a drafter: one more decoder layer that predicts the token after next
(Qwen3.5, Qwen3.6 and Qwen3-Next checkpoints, tensors `mtp.*`; Transformers leaves them out).

At position i it reads the embedding of token i+1 and the target's final hidden state of token i, and
gives a hidden state for token i+2; further tokens are drafted from its own output in place of the
target's. Its keys and values are kept for the committed text, as servers do (vLLM
qwen3_next_mtp.py, by description).

Shapes: T tokens, H hidden, V vocabulary.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils.hub import cached_file

from draftsmith.config import TargetConfig
from draftsmith.core import UserError
from draftsmith.decode.tree import Draft, chain
from draftsmith.target.load import final_norm, text_decoder, unembed
from draftsmith.target.taps import decoder_layers

PREFIX = "mtp."


class MTPHead(nn.Module):
    """The layer and what joins its two inputs, under the checkpoint's names."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        decoder = text_decoder(model)
        config = copy.deepcopy(model.config.get_text_config(decoder=True))
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config._attn_implementation = "sdpa"
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer: Any = type(decoder_layers(decoder, "target.model")[0])
        self.layers = nn.ModuleList([layer(config, 0)])
        norm: Any = type(final_norm(model))
        eps = {"eps": config.rms_norm_eps}
        self.norm: nn.Module = norm(config.hidden_size, **eps)
        self.pre_fc_norm_embedding: nn.Module = norm(config.hidden_size, **eps)
        self.pre_fc_norm_hidden: nn.Module = norm(config.hidden_size, **eps)
        self._rotary: list[Any] = [decoder.rotary_emb]  # the target's: not a part of this head

    def forward(
        self,
        embeddings_TH: Tensor,
        hidden_TH: Tensor,
        positions_T: Tensor,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """[T, H], normed: token i+1's embedding with token i's final-normed state, at position i."""
        joined = [self.pre_fc_norm_embedding(embeddings_TH), self.pre_fc_norm_hidden(hidden_TH)]
        x = self.fc(torch.cat(joined, dim=-1))[None]
        rotary, positions = self._rotary[0], positions_T[None]
        turned = positions[None].expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions
        past = cache.get_seq_length() if cache is not None else 0
        keys = torch.arange(past + x.shape[1], device=x.device)
        mask = (keys[None] <= past + torch.arange(x.shape[1], device=x.device)[:, None])[None, None]
        x = self.layers[0](
            x, position_embeddings=rotary(x, turned), attention_mask=mask, position_ids=positions,
            cache=cache,
        )  # fmt: skip
        return self.norm(x)[0]


class MTPProposer:
    """Drafts `num_tokens` a round, greedily. Features are the raw output of the target's last layer."""

    def __init__(self, head: MTPHead, model: PreTrainedModel, num_tokens: int) -> None:
        self._head, self._model, self._count = head, model, num_tokens
        self._norm, (self._embedding, self._lm_head, self._softcap) = (
            final_norm(model), unembed(model),
        )  # fmt: skip
        self._cache = DynamicCache()
        self._tokens: list[int] = []  # committed, whose successors the head has not read
        self._hidden: list[Tensor] = []

    @torch.inference_mode()
    def extend(self, token_ids: list[int], features: Tensor) -> None:
        self._tokens += token_ids
        self._hidden.append(self._norm(features[:, 0]))

    @torch.inference_mode()
    def propose(self, anchor_id: int) -> Draft:
        hidden = torch.cat(self._hidden)
        committed = self._cache.get_seq_length() if len(self._cache.layers) else 0
        out = self._step([*self._tokens[1:], anchor_id], hidden, committed)[-1:]
        length = committed + len(hidden)
        self._tokens, self._hidden = [], []
        drafts: list[int] = []
        for i in range(self._count):
            if i:
                out = self._step([drafts[-1]], out, length + i - 1)
            drafts.append(int(self._logits(out).argmax(-1)))
        for layer in self._cache.layers:  # what was drafted is not committed
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]  # type: ignore[index,union-attr]
        return chain(anchor_id, drafts)

    def _step(self, ids: list[int], hidden_TH: Tensor, begin: int) -> Tensor:
        at = torch.tensor(ids, device=self._embedding.device)
        embeddings = F.embedding(at, self._embedding).to(hidden_TH.device)
        positions = torch.arange(begin, begin + len(ids), device=hidden_TH.device)
        return self._head(embeddings, hidden_TH, positions, self._cache)

    def _logits(self, hidden_TH: Tensor) -> Tensor:
        logits = F.linear(hidden_TH.to(self._lm_head.device), self._lm_head)
        return self._softcap * torch.tanh(logits / self._softcap) if self._softcap else logits


def load_mtp(target: TargetConfig, model: PreTrainedModel) -> MTPHead:
    """The head of this target's checkpoint. Raises UserError where it has none, or one that does not
    fit.
    """
    tensors = _tensors(target)
    if not tensors:
        raise UserError(
            where="evaluate.methods",
            found=f"mtp, and {target.model} without tensors named {PREFIX}*",
            expected="a checkpoint with its MTP head (Qwen3.5, Qwen3.6, Qwen3-Next)",
            remedy="Leave mtp out of evaluate.methods.",
        )
    try:
        head = MTPHead(model).to(model.dtype)
        head.load_state_dict(tensors)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise UserError(
            where="evaluate.methods",
            found=f"mtp, and an MTP head in {target.model} that is built otherwise "
            f"({' '.join(str(error).split())[:200]})",
            expected="one full-attention layer like the target's own, as Qwen3.5 has it",
            remedy="Leave mtp out of evaluate.methods.",
        ) from None
    return head.to(unembed(model)[1].device).eval().requires_grad_(False)


def _tensors(target: TargetConfig) -> dict[str, Tensor]:
    """The checkpoint's `mtp.*` tensors, without the prefix."""
    out = {}
    for path in _weight_files(target):
        with safe_open(path, framework="pt") as file:
            out |= {
                name.removeprefix(PREFIX): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118  # no mapping
                if name.startswith(PREFIX)
            }
    return out


def _weight_files(target: TargetConfig) -> list[Path]:
    """The safetensors files that may hold the head."""

    def file(name: str) -> Path | None:
        found = cached_file(
            target.model, name, revision=target.revision,
            _raise_exceptions_for_missing_entries=False,
        )  # fmt: skip
        return None if found is None else Path(found)

    index = file("model.safetensors.index.json")
    names = {"model.safetensors"}
    if index is not None:
        placed = json.loads(index.read_text())["weight_map"]
        names = {where for name, where in placed.items() if name.startswith(PREFIX)}
    return [found for name in sorted(names) if (found := file(name)) is not None]
