"""A micro-batch on its way through the drafter: anchors, blocks, masks, hidden states, loss."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.config import RunConfig
from draftsmith.drafter.attention import TILE, by_sample, flex_mask, whole_tiles
from draftsmith.drafter.blocks import Blocks, anchor_limit, draw_anchors, make_blocks, slot_weights
from draftsmith.drafter.loss import BlockLoss, block_hits, block_loss
from draftsmith.drafter.model import DFlash
from draftsmith.features import FeatureBatch, Source
from draftsmith.ranks import Ranks
from draftsmith.train.schedule import Round, Step, turns


class Forward:
    """A micro-batch through the drafter, to its loss or to its hits. On a GPU every row has one shape,
    so that the layers are compiled once.
    """

    def __init__(
        self,
        cfg: RunConfig,
        drafter: DFlash,
        net: Callable[..., Tensor],
        norm: nn.Module | None,
        share: float = 1.0,
    ) -> None:
        self.drafter, self.net, self._cfg, self._norm = drafter, net, cfg, norm
        self._share = share
        self.device = drafter.shared[0].device
        self._flex = self.device.type == "cuda"
        self._autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self._flex)
        gamma = slot_weights(drafter.shape.block_size, cfg.train.gamma).to(self.device)
        self._weights = gamma if cfg.train.weights == "gamma" else None

    def loss(self, batch: FeatureBatch | None, epoch: int) -> tuple[BlockLoss, int]:
        """The loss, and the number of anchors; of None, a row that weighs nothing."""
        cfg = self._cfg
        batch = batch or self._nothing()
        drawn = [
            self._anchors(mask.numpy(), epoch, i)
            for mask, i in zip(batch.loss_mask.split(batch.lengths), batch.sample_ids, strict=True)
        ]
        argmax = batch.extra["argmax"].cpu() if cfg.train.labels == "target" else None
        blocks = self._blocks(batch, drawn, argmax)
        hidden = self._hidden(batch.hidden, blocks)
        teacher = None
        if cfg.train.loss != "ce":
            assert self._norm is not None, "the target's final norm is kept for this loss"
            with torch.no_grad():
                teacher = self._norm(batch.extra["final"])
        loss = block_loss(
            self.drafter, hidden, blocks, self._weights, name=cfg.train.loss, teacher_NH=teacher
        )
        return loss, sum(map(len, drawn))

    def _anchors(self, mask: np.ndarray, epoch: int, sample_id: int) -> np.ndarray:
        places = int((mask[:-1] & mask[1:]).sum())
        limit = anchor_limit(places, self._share, self._cfg.train.blocks_together)
        seed = self._cfg.train_seed
        return draw_anchors(mask, limit=limit, seed=seed, epoch=epoch, sample_id=sample_id)

    @torch.no_grad()
    def hits(
        self, batch: FeatureBatch | None, anchors: np.ndarray | None, features: Tensor | None
    ) -> Tensor:
        """[A, B] whether each slot at these anchors of one text is the text's token (verdict.Hits)."""
        row = (batch or self._nothing()).to(self.device, self._dtype)
        drawn = np.zeros(0, np.int64) if anchors is None else anchors
        blocks = self._blocks(row, [drawn], None)
        states = row.hidden if features is None else features.to(self.device, self._dtype)
        return block_hits(self.drafter, self._hidden(states, blocks), blocks)[: len(drawn)]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._flex else torch.float32

    def _blocks(
        self, batch: FeatureBatch, anchors: list[np.ndarray], argmax: Tensor | None
    ) -> Blocks:
        shape = self.drafter.shape
        count = whole_tiles(self._cfg.train.blocks_together, shape.block_size)
        return make_blocks(
            batch.input_ids, batch.loss_mask, batch.lengths, anchors, shape, argmax_N=argmax,
            num_blocks=count if self._flex else None,
        ).to(self.device)  # fmt: skip

    def _hidden(self, features_NKH: Tensor, blocks: Blocks) -> Tensor:
        """[Q, H] of the blocks."""
        shape, budget = self.drafter.shape, self._cfg.train.micro_batch_tokens
        num_context = -(-len(features_NKH) // budget) * budget  # a longer sample goes alone
        num_context = -(-num_context // TILE) * TILE
        masks = {}
        for kind in set(shape.layer_types):
            seen: dict[str, Any] = {"window": shape.window(kind), "causal": shape.is_causal(kind)}
            masks[kind] = (
                flex_mask(blocks, num_context, shape.block_size, **seen)
                if self._flex
                else by_sample(blocks, shape.block_size, **seen)
            )
        with self._autocast:
            hidden = self.net(
                self.drafter.embed(blocks.block_ids)[None], blocks.positions[None],
                features_NKH[None], blocks.context_positions[None], masks,
                num_context=num_context if self._flex else None,
            )  # fmt: skip
        return hidden[0]

    def _nothing(self) -> FeatureBatch:
        shape = self.drafter.shape
        hidden = torch.zeros(1, len(shape.taps), shape.hidden_size, device=self.device)
        extra = {
            "final": torch.zeros(1, shape.hidden_size, device=self.device, dtype=self._dtype),
            "argmax": torch.zeros(1, dtype=torch.int32),
        }
        ids, mask = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.uint8)
        return FeatureBatch([-1], [1], hidden.to(self._dtype), ids, mask, extra)

    def micro_batches(
        self, source: Source, steps: list[Step], dealt: Iterable[list[Round]], ranks: Ranks
    ) -> Iterator[FeatureBatch | None]:
        """This rank's micro-batches on the device; None where a step has too few for all ranks."""
        both = zip(steps, dealt, strict=True)
        for _, of_epoch in itertools.groupby(both, key=lambda one: one[0].epoch):
            rounds = [each for _, of_step in of_epoch for each in of_step]
            mine = [each[ranks.rank] for each in rounds]
            together = turns(rounds, source.fit)
            batches = source.batches(mine, pinned=self._flex, turns=together)
            for row, batch in zip(mine, batches, strict=True):
                assert (batch is None) == (not row), "a batch a row"
                yield batch.to(self.device, self._dtype) if batch else None
            source.end_epoch()
