"""Which micro-batches make a step, for how many steps, at what rate: all of it a pure function of the
configuration and the samples' sizes.
"""

import math
from dataclasses import dataclass

from draftsmith.config import TrainConfig
from draftsmith.drafter.blocks import anchor_limit, anchor_share
from draftsmith.features import epoch_plan
from draftsmith.ranks import Ranks

FEW_ROWS = 4
"""A step of fewer micro-batches is of samples of one length, unless each is a mixture."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: its micro-batches, as positions into the source's samples."""

    epoch: int
    rows: list[list[int]]


def rows_of(step: Step, ranks: Ranks) -> list[list[int]]:
    """A rank's share of a step's micro-batches; empty ones where others have one more."""
    rounds = -(-len(step.rows) // ranks.count)
    places = range(ranks.rank, rounds * ranks.count, ranks.count)
    return [step.rows[k] if k < len(step.rows) else [] for k in places]


def plan_steps(
    train: TrainConfig, lengths: list[int], num_anchors: list[int], seed: int
) -> list[Step]:
    """Every optimizer step of the run: micro-batches gathered up to `tokens_per_step` target tokens
    (a micro-batch that holds more is a step of its own).

    A micro-batch is bounded in tokens and in blocks: a sample counts as what it fills of either.
    """
    most = train.blocks_together
    a_block = train.micro_batch_tokens / most
    share = anchor_share(num_anchors, train.anchors_per_sample)
    sizes = [
        max(n, math.ceil(anchor_limit(a, share, most) * a_block))
        for n, a in zip(lengths, num_anchors, strict=True)
    ]
    steps: list[Step] = []
    mixed = train.tokens_per_step < FEW_ROWS * train.micro_batch_tokens
    for epoch in range(train.epochs):
        plan = epoch_plan(
            sizes, budget=train.micro_batch_tokens, seed=seed, epoch=epoch, mixed=mixed
        )
        rows: list[list[int]] = []
        held = 0
        for row in plan.rows:
            tokens = sum(lengths[i] for i in row)
            if rows and held + tokens > train.tokens_per_step:
                steps.append(Step(epoch, rows))
                rows, held = [], 0
            rows.append(row)
            held += tokens
        steps.append(Step(epoch, rows))
    return steps[: train.max_steps]


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Linear warmup, then cosine to zero. `step` counts from 0."""
    warmup = max(1, round(train.warmup_ratio * num_steps))
    if step < warmup:
        return train.lr * (step + 1) / warmup
    return train.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
