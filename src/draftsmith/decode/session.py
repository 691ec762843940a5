"""One prompt's target: prefill, verify a block, commit what was accepted. The cache after commit(n)
is as if only the accepted tokens had ever been seen.

Attention layers forget by dropping keys and values. Gated DeltaNet layers take back the state after
the last accepted token, which our own step kept (decode/gdn.py), and their convolution window is
cut likewise; no second forward is needed. Other stateful layers are restored from a snapshot and
advanced again over the accepted tokens. `cache.crop` is never called: on a hybrid it leaves the
recurrent state advanced, without an error.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from draftsmith.core import UserError
from draftsmith.decode.gdn import is_gdn, own_steps
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


class TargetSession:
    """The target on one prompt. `taps` may be empty when no features are wanted."""

    def __init__(self, model: PreTrainedModel, taps: list[int]) -> None:
        self.model, self.taps = model, taps
        self.decoder = text_decoder(model)
        self.cache = new_cache(model)
        self.gdn = is_gdn(self.decoder)
        self.num_committed = self.num_calls = 0
        self._block: Tensor | None = None
        self._tape: list[Tensor] = []
        self._snapshot: list[dict[str, Tensor]] = []
        if self.gdn:
            for layer in self._linear_layers():
                layer.record_past = True  # the convolution then keeps its inputs until we cut them

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits after the last prompt token [V] (fp32 or wider) and the prompt's features [P,
        taps, H].
        """
        logits, features = self._forward(self._tensor(prompt_ids), last_only=True)
        self.num_committed = len(prompt_ids)
        self._cut_convolutions(0)
        for layer in (
            self._linear_layers() if self.gdn else []
        ):  # the library's prefill leaves fp32 in an fp64 model too
            layer.recurrent_states[0] = layer.recurrent_states[0].to(logits.dtype)
        return logits[-1], features

    @torch.inference_mode()
    def verify(self, block_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and features [T, taps, H] of T tokens after the committed text. Call
        commit() next.
        """
        assert self._block is None, "commit() the last block first"
        self._block = self._tensor(block_ids)
        self._tape.clear()
        if not self.gdn:
            self._snapshot = [self._states(layer) for layer in self._linear_layers()]
        return self._forward(self._block)

    @torch.inference_mode()
    def commit(self, num_accepted: int) -> None:
        """Keep the first `num_accepted` tokens of the block (at least 1: the anchor), forget the
        rest.
        """
        assert self._block is not None and 1 <= num_accepted <= self._block.shape[1], (
            "between 1 and the block's size"
        )
        dropped = self._block.shape[1] - num_accepted
        if dropped and any(self._snapshot):
            self._restore_and_advance(num_accepted)
        elif dropped:
            self._drop_keys(dropped)
        if self.gdn:
            self._cut_convolutions(dropped)
            for layer, states in zip(self._linear_layers(), self._tape, strict=True):
                layer.recurrent_states[0].copy_(states[num_accepted - 1])
        self.num_committed += num_accepted
        self._block = None

    def _forward(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        positions = torch.arange(
            self.num_committed, self.num_committed + ids.shape[1], device=ids.device
        )[None]
        with own_steps(self.decoder, self._tape), capture(self.decoder, self.taps) as seen:
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
            )
        logits = out.logits[0]
        features = (
            stack_taps(seen, self.taps)[0] if self.taps else logits.new_empty(ids.shape[1], 0, 0)
        )
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), features

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)

    def _linear_layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]

    def _drop_keys(self, count: int) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                assert layer.values is not None, "keys come with values"
                layer.keys, layer.values = (
                    layer.keys[..., :-count, :],
                    layer.values[..., :-count, :],
                )

    def _cut_convolutions(self, dropped: int) -> None:
        for layer in self._linear_layers() if self.gdn else []:
            window, state = layer.conv_kernel_size[0], layer.conv_states[0]
            layer.conv_states[0] = state[..., : state.shape[-1] - dropped][..., -window:].clone()

    def _states(self, layer: Any) -> dict[str, Tensor]:
        kinds = {"conv_states": layer.conv_states, "recurrent_states": layer.recurrent_states}
        return {
            f"{kind}.{i}": state.clone()
            for kind, states in kinds.items()
            for i, state in states.items()
            if state is not None
        }

    def _restore_and_advance(self, num_accepted: int) -> None:
        assert self._block is not None
        self._drop_keys(self._block.shape[1])
        for layer, states in zip(self._linear_layers(), self._snapshot, strict=True):
            for name, saved in states.items():
                kind, _, index = name.partition(".")
                getattr(layer, kind)[int(index)].copy_(saved)
        self._forward(self._block[:, :num_accepted], last_only=True)
