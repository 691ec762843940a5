"""Several prompts on one target at once: verify a chain of each, commit of each as many tokens as it
accepted. A row's cache is then what a TargetSession of that prompt alone would hold.

Keys of rejected tokens stay as holes: `kept` says which keys are text, and masks hide the others. When
the cache is twice as wide as the longest row, the text is moved together. Gated DeltaNet layers fold each
row's own tokens into its state, and keep its own window of the convolution's inputs.

Shapes: B rows, T tokens of a chain, n keys, h key heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from draftsmith.core import UserError
from draftsmith.decode.gdn import Block, own_steps
from draftsmith.decode.session import TargetSession, attention_masks
from draftsmith.target.taps import capture, stack_taps


class BatchSession:
    """The target on B prompts, chains only. `taps` may be empty when no features are wanted."""

    def __init__(self, model: PreTrainedModel, taps: list[int]) -> None:
        self.model, self.taps, self.num_calls = model, taps, 0
        self.lengths: list[int] = []  # committed tokens of each row

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Of each row the logits after its last token [V] and its features [P, taps, H]. One by one:
        rows of any length give what they give alone.
        """
        sessions = [TargetSession(self.model, self.taps) for _ in prompts]
        out = [session.prefill(ids) for session, ids in zip(sessions, prompts, strict=True)]
        first = sessions[0]
        if not first.gdn and any(isinstance(x, LinearAttentionLayer) for x in first.cache.layers):
            raise UserError(
                where="evaluate.batch",
                found=f"{len(prompts)} prompts at once on {type(self.model).__name__}",
                expected="a target of attention and Gated DeltaNet layers",
                remedy="Set evaluate.batch: 1.",
            )
        self.decoder, self.gdn, self.num_calls = first.decoder, first.gdn, len(prompts)
        self.lengths = [len(ids) for ids in prompts]
        self.cache = _stacked([session.cache for session in sessions], max(self.lengths))
        left = max(self.lengths) - self._tensor(self.lengths)[:, None]
        self.positions_Bn = torch.arange(max(self.lengths), device=self.model.device) - left
        self.kept_Bn = self.positions_Bn >= 0
        return out

    @torch.inference_mode()
    def verify(self, chains: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Of each row logits [t, V] and features [t, taps, H] of the t tokens that follow its text.
        Call commit() next.
        """
        self.num_calls += 1
        T = max(len(chain) for chain in chains)
        ids = self._tensor([chain + [0] * (T - len(chain)) for chain in chains])
        block = Block.of(list(range(-1, T - 1)), ids.device)
        at = self._tensor(self.lengths)[:, None] + torch.arange(T, device=ids.device)
        keys = torch.cat([self.positions_Bn, at], dim=1)
        chain = block.seen.expand(len(chains), T, T)
        seen = torch.cat([self.kept_Bn[:, None].expand(-1, T, -1), chain], dim=2)
        with own_steps(self.decoder, block), capture(self.decoder, self.taps) as tapped:
            out = self.model(
                input_ids=ids,
                position_ids=at,
                attention_mask=attention_masks(self.model, seen, at, keys),  # pyright: ignore[reportArgumentType]
                cache=self.cache,
                use_cache=True,
            )
        self._block, self.positions_Bn = block, keys
        logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
        none = logits.new_empty(*ids.shape, 0, 0)
        features = stack_taps(tapped, self.taps) if self.taps else none
        return [(logits[b, : len(c)], features[b, : len(c)]) for b, c in enumerate(chains)]

    @torch.inference_mode()
    def commit(self, accepted: list[int]) -> None:
        """Keep so many tokens of each row's chain (the first, and the drafts that were right)."""
        T = len(self._block.parents)
        assert all(1 <= count <= T for count in accepted), "the first token of a chain is text"
        count_B = self._tensor(accepted)
        fresh = torch.arange(T, device=count_B.device) < count_B[:, None]
        self.kept_Bn = torch.cat([self.kept_Bn, fresh], dim=1)
        self.lengths = [old + new for old, new in zip(self.lengths, accepted, strict=True)]
        for i, layer in enumerate(self._linear_layers()):
            window, state = layer.conv_kernel_size[0], layer.conv_states[0]
            ends = state.shape[-1] - T + count_B
            index = ends[:, None] - window + torch.arange(window, device=ends.device)
            index = index[:, None].expand(-1, state.shape[1], -1)
            layer.conv_states[0] = state.gather(-1, index)
            if T > 1:  # a single token has advanced the states itself
                self._block.stashes[i].fold_each(layer.recurrent_states[0], count_B)
        if self.kept_Bn.shape[1] > 2 * max(self.lengths):
            self._close_holes()

    @torch.inference_mode()
    def keep_rows(self, rows: list[int]) -> None:
        """Forget the other rows."""
        index: Any = self._tensor(rows)
        for layer in self.cache.layers:
            layer.reorder_cache(index)
        self.lengths = [self.lengths[row] for row in rows]
        self.positions_Bn, self.kept_Bn = self.positions_Bn[index], self.kept_Bn[index]

    def _close_holes(self) -> None:
        """Each row's text at the right end of a cache as wide as the longest."""
        order = self.kept_Bn.int().argsort(dim=1, stable=True)[:, -max(self.lengths) :]
        self.kept_Bn = self.kept_Bn.gather(1, order)
        self.positions_Bn = self.positions_Bn.gather(1, order)
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                assert layer.values is not None, "keys come with values"
                layer.keys, layer.values = (
                    x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
                    for x in (layer.keys, layer.values)
                )

    def _linear_layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]

    def _tensor(self, numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.model.device)


def _stacked(caches: list[DynamicCache], width: int) -> DynamicCache:
    """The first cache, made one of all rows: keys behind holes up to `width`, short windows of the
    convolutions behind zeros.
    """

    def behind(rows: list[Tensor], dim: int, size: int) -> Tensor:
        return torch.cat([F.pad(x, (0, 0) * (-dim - 1) + (size - x.shape[dim], 0)) for x in rows])

    for i, layer in enumerate(caches[0].layers):
        rows: list[Any] = [cache.layers[i] for cache in caches]
        if isinstance(layer, LinearAttentionLayer):
            window = layer.conv_kernel_size[0]
            assert window is not None, "set by the prefill"
            layer.conv_states[0] = behind([row.conv_states[0] for row in rows], -1, window)
            layer.recurrent_states[0] = torch.cat([row.recurrent_states[0] for row in rows])
        elif isinstance(layer, DynamicLayer) and layer.keys is not None:
            layer.keys = behind([row.keys for row in rows], -2, width)
            layer.values = behind([row.values for row in rows], -2, width)
    return caches[0]
