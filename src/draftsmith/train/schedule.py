"""Which micro-batches make a step, for how many steps, at what rate: all of it a pure function of the
configuration and the samples' sizes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from draftsmith.config import TrainConfig
from draftsmith.drafter.blocks import anchor_limit, anchor_share
from draftsmith.features import epoch_plan

Round = list[list[int]]
"""A micro-batch for each rank, as positions into the source's samples; empty where it has none."""
FEW_ROWS = 4
"""A step of fewer micro-batches is of samples of one length, unless each is a mixture."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: its micro-batches, as positions into the source's samples."""

    epoch: int
    rows: list[list[int]]


def num_rounds(step: Step, count: int) -> int:
    """In which `count` ranks do a step."""
    return -(-len(step.rows) // count)


def deal(steps: list[Step], lengths: list[int], count: int) -> Iterator[list[Round]]:
    """The rounds of each step: a micro-batch for each of `count` ranks at a time, an empty one where others have
    one more. Ranks wait for each other, and a live target costs what a micro-batch holds: the largest go to
    the ranks that have had the fewest tokens so far.
    """
    had = [0] * count
    for step in steps:
        rounds = num_rounds(step, count)
        of_rank: list[list[list[int]]] = [[] for _ in range(count)]
        sizes = [sum(lengths[i] for i in row) for row in step.rows]
        for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
            open_ranks = (r for r in range(count) if len(of_rank[r]) < rounds)
            rank = min(open_ranks, key=lambda r: had[r])
            of_rank[rank].append(step.rows[k])
            had[rank] += sizes[k]
        yield [[r[k] if k < len(r) else [] for r in of_rank] for k in range(rounds)]


def turns(rounds: Iterable[Round], fit: Callable[[list[list[int]]], bool]) -> Iterator[int]:
    """How many rounds at a time fit on every rank, or are one: when the target runs on one rank it runs on all,
    and none waits for another's.
    """
    held: list[list[list[int]]] = []
    for each in rounds:
        longer = [[*rows, row] for rows, row in zip(held or [[]] * len(each), each, strict=True)]
        if held and not all(map(fit, longer)):
            yield len(held[0])
            longer = [[row] for row in each]
        held = longer
    if held:
        yield len(held[0])


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
