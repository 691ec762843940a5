"""One prompt's target: prefill, verify a chain or a tree of tokens, commit the accepted path. The
cache after commit is as if only the accepted tokens had ever been seen.

Attention layers keep the path's keys and values and drop the rest. Gated DeltaNet layers do not move
until the path is folded into their state from the block's stash (decode/gdn.py), and their
convolution window keeps the path likewise; no second forward is needed. Other stateful layers are
restored from a snapshot and advanced again over the accepted tokens; they verify chains only.
`cache.crop` is never called: on a hybrid it leaves the recurrent state advanced, without an error.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from draftsmith.core import UserError
from draftsmith.decode.gdn import Block, is_gdn, own_steps
from draftsmith.target.load import text_decoder
from draftsmith.target.taps import capture, stack_taps


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache whose sliding layers keep every key (the mask applies the window), so that they can
    be rolled back.
    """
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[i] = DynamicLayer()
        elif not isinstance(layer, (DynamicLayer, LinearAttentionLayer)) or isinstance(
            layer, DynamicSlidingWindowLayer
        ):
            raise UserError(
                where="target.model",
                found=f"a cache layer of type {type(layer).__name__}",
                expected="attention or linear-attention layers",
                remedy="This family cannot be decoded here yet.",
            )
    return cache


def attention_masks(
    model: PreTrainedModel, seen_BTn: Tensor, at_BT: Tensor, keys_Bn: Tensor
) -> Tensor | dict[str, Tensor]:
    """What attention layers take as [B, 1, T, n]: `seen` is True where a token may look, `at` and
    `keys` are the positions of the tokens and of the keys. A mask by layer type when the model has
    sliding layers.
    """
    config = model.config.get_text_config(decoder=True)

    def given(seen: Tensor) -> Tensor:
        if config._attn_implementation != "eager":
            return seen[:, None]
        # eager attention adds the mask to the scores: a boolean one would add 1 and hide nothing
        hidden = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
        return hidden.masked_fill(~seen, torch.finfo(model.dtype).min)[:, None]

    window = getattr(config, "sliding_window", None)
    if "sliding_attention" not in (getattr(config, "layer_types", None) or []) or not window:
        return given(seen_BTn)
    near = at_BT[:, :, None] - keys_Bn[:, None] < window
    return {"full_attention": given(seen_BTn), "sliding_attention": given(seen_BTn & near)}


class TargetSession:
    """The target on one prompt. `taps` may be empty when no features are wanted."""

    def __init__(self, model: PreTrainedModel, taps: list[int]) -> None:
        self.model, self.taps = model, taps
        self.decoder = text_decoder(model)
        self.cache = new_cache(model)
        self.gdn = is_gdn(self.decoder)
        self.num_committed = self.num_calls = 0
        self._ids: Tensor | None = None
        self._block: Block | None = None
        self._snapshot: list[dict[str, Tensor]] = []
        if self.gdn:
            for layer in self._linear_layers():
                layer.record_past = True  # the convolution then keeps its inputs until we cut them

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits after the last prompt token [V] (fp32 or wider) and the prompt's features [P,
        taps, H].
        """
        logits, features = self._forward(self._tensor(prompt_ids), None, last_only=True)
        self.num_committed = len(prompt_ids)
        self._keep_convolutions(len(prompt_ids), list(range(len(prompt_ids))))
        for layer in (
            self._linear_layers() if self.gdn else []
        ):  # the library's prefill leaves fp32 in an fp64 model too
            layer.recurrent_states[0] = layer.recurrent_states[0].to(logits.dtype)
        return logits[-1], features

    @torch.inference_mode()
    def verify(self, ids: list[int], parents: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and features [T, taps, H] of T nodes after the committed text: a chain, or
        the tree of these parents (-1 for the root). Call commit() next.
        """
        assert self._block is None, "commit() the last block first"
        self._block = Block.of(parents or list(range(-1, len(ids) - 1)), self.model.device)
        self._ids = self._tensor(ids)
        if not self.gdn and self._linear_layers():
            assert self._block.is_chain, "only chains can be verified on this family"
            self._snapshot = [self._states(layer) for layer in self._linear_layers()]
        return self._forward(self._ids, self._block)

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """Keep these nodes, root first, each the parent of the next; forget the others."""
        assert self._block is not None and self._ids is not None, "verify() comes first"
        size = len(self._block.parents)
        assert [self._block.parents[node] for node in path] == [-1, *path[:-1]], (
            "a path from the root"
        )
        if self._snapshot and len(path) < size:
            self._restore_and_advance(len(path))
        else:
            self._keep_keys(size, path)
        if self.gdn:
            self._keep_convolutions(size, path)
            stashes = self._block.stashes
            if size > 1:  # a single node has advanced the states itself
                index = self._index(0, path)
                for layer, stash in zip(self._linear_layers(), stashes, strict=True):
                    stash.fold(layer.recurrent_states[0], index)
        self.num_committed += len(path)
        self._block, self._ids, self._snapshot = None, None, []

    def _forward(
        self, ids: Tensor, block: Block | None, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        T = ids.shape[1]
        depths = block.depths if block else list(range(T))
        positions = self.num_committed + torch.tensor([depths], device=ids.device)
        mask = {} if block is None or block.is_chain else {"attention_mask": self._mask(block)}
        with own_steps(self.decoder, block), capture(self.decoder, self.taps) as seen:
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **mask,
            )
        logits = out.logits[0]
        features = stack_taps(seen, self.taps)[0] if self.taps else logits.new_empty(T, 0, 0)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), features

    def _mask(self, block: Block) -> Any:
        device = block.seen.device
        past = block.seen.new_ones(len(block.parents), self.num_committed)
        at = self.num_committed + torch.tensor(block.depths, device=device)
        keys = torch.cat([torch.arange(self.num_committed, device=device), at])
        seen = torch.cat([past, block.seen], dim=1)
        return attention_masks(self.model, seen[None], at[None], keys[None])

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)

    def _linear_layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]

    def _keep_keys(self, size: int, path: list[int]) -> None:
        """Of the last `size` keys, those of the path, moved together in place."""
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                assert layer.values is not None, "keys come with values"
                past = layer.keys.shape[-2] - size
                end = past + len(path)
                if path != list(range(len(path))):
                    index = self._index(past, path)
                    for x in (layer.keys, layer.values):
                        x[..., past:end, :] = x.index_select(-2, index)
                layer.keys, layer.values = layer.keys[..., :end, :], layer.values[..., :end, :]

    def _index(self, past: int, path: list[int]) -> Tensor:
        return torch.tensor([past + n for n in path], dtype=torch.long, device=self.model.device)

    def _keep_convolutions(self, size: int, path: list[int]) -> None:
        """Of the last `size` inputs, those of the path; of all, as many as the convolution looks back:
        one gather a layer, its index made once.
        """
        indices: dict[tuple[int, int], Tensor] = {}
        for layer in self._linear_layers() if self.gdn else []:
            window, state = layer.conv_kernel_size[0], layer.conv_states[0]
            past = state.shape[-1] - size
            if (past, window) not in indices:
                kept = [*range(past), *(past + node for node in path)][-window:]
                indices[past, window] = self._index(0, kept)
            layer.conv_states[0] = state.index_select(-1, indices[past, window])

    def _states(self, layer: Any) -> dict[str, Tensor]:
        kinds = {"conv_states": layer.conv_states, "recurrent_states": layer.recurrent_states}
        return {
            f"{kind}.{i}": state.clone()
            for kind, states in kinds.items()
            for i, state in states.items()
            if state is not None
        }

    def _restore_and_advance(self, num_accepted: int) -> None:
        assert self._ids is not None and self._block is not None, "verify() comes first"
        self._keep_keys(len(self._block.parents), [])
        for layer, states in zip(self._linear_layers(), self._snapshot, strict=True):
            for name, saved in states.items():
                kind, _, index = name.partition(".")
                getattr(layer, kind)[int(index)].copy_(saved)
        self._forward(self._ids[:, :num_accepted], None, last_only=True)
