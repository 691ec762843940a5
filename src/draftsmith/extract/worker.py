"""What an extraction worker does: load the target, run the rows of the shards that come to it, write them.
While the target computes a row, the rows before are copied, checked, encoded and written.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from draftsmith import places
from draftsmith.config import RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.engines.local import Done, Say
from draftsmith.extract.plan import ENGINES
from draftsmith.store.foreign import ForeignStates, ReadRow
from draftsmith.store.shards import SampleFeatures, shard_name, shard_number
from draftsmith.store.writer import ShardWriter
from draftsmith.target.forward import RowStates, StatesForward
from draftsmith.target.load import device_of, inspect_target, load_target, unembed
from draftsmith.target.packed import has_kernels
from draftsmith.target.selftest import self_test

AHEAD = 2  # rows that the GPU has been given before the CPU looks at the first one's states

Rows = list[list[Sample]]
Forward = StatesForward | ForeignStates


def work(
    cfg: RunConfig,
    engine: str,
    taps: list[int],
    probes: list[Sample],
    said: dict[str, str],
    room: int | None,
    shards_: Iterator[tuple[int, Rows]],
    say: Say,
    done: Done,
) -> None:
    """A worker: load the target, make the shards that come, tell of tokens, events and whole shards."""

    def event(kind: str, **fields: Any) -> None:
        say({"kind": kind, **fields})
        if kind == "shard":
            done(shard_number(fields["name"]))

    begun = time.monotonic()
    if cfg.extract.files is not None:
        forward: Forward = ForeignStates.of(cfg, inspect_target(cfg.target), taps)
    else:
        forward = target_forward(cfg, engine, taps)
        event("loaded", what="target", seconds=round(time.monotonic() - begun, 3))
    if isinstance(forward, StatesForward) and forward.row_tokens is not None:
        event("self_test", **self_test(forward, probes))
    with ShardWriter(places.at(cfg.store), cfg.extract.codec, said, event, room) as writer:
        run_shards(forward, shards_, writer, say)
    if writer.full:
        event("budget_spent")


def target_forward(cfg: RunConfig, engine: str, taps: list[int]) -> StatesForward:
    """The loaded target, cut and ready for rows."""
    _check_kernels(cfg, engine)
    model = load_target(cfg.target)
    unembed(model)  # a head the drafter cannot share is better refused before the work
    return StatesForward(
        model,
        taps,
        cfg.features.final,
        getattr(torch, cfg.features.dtype),
        row_tokens=cfg.extract.tokens_per_batch if engine == ENGINES["packed"] else None,
    )


def run_shards(
    forward: Forward,
    shards_: Iterable[tuple[int, Rows]],
    writer: ShardWriter,
    say: Callable[[tuple[int, int]], None],
) -> None:
    """Run the rows of these shards, hand each to the writer, say (shard, tokens) of each row. AHEAD rows
    are always under way, over the shards' ends too, so that a GPU never waits for the CPU's checks.
    """
    underway: deque[tuple[int, bool, RowStates | ReadRow]] = deque()
    features: list[SampleFeatures] = []

    def take() -> None:
        nonlocal features
        number, last, states = underway.popleft()
        features += states.features()
        say((number, sum(len(s.input_ids) for s in states.samples)))
        if last:
            writer.put(shard_name(number), features)
            features = []

    for number, rows in shards_:
        if writer.full:
            break
        for i, row in enumerate(rows):
            underway.append((number, i == len(rows) - 1, forward(row)))
            if len(underway) > AHEAD:
                take()
    while underway:
        take()


def _check_kernels(cfg: RunConfig, engine: str) -> None:
    """Without fla a GPU runs a hybrid's recurrence in plain torch: right, and several times slower."""
    info = inspect_target(cfg.target)
    if device_of(cfg.target).type != "cuda" or has_kernels(info.model_type):
        return
    install = "pip install 'draftsmith[gpu]'"
    if engine == ENGINES["packed"]:
        raise UserError(
            where="extract.rows",
            found=f"packed rows of {info.model_type} on a GPU, and no flash-linear-attention",
            expected="its kernels, which reset states inside a row",
            remedy=f"{install}, or extract.rows: padded in a new store.",
        )
    print(
        f"extract: flash-linear-attention is not installed: {info.model_type} runs in right-padded "
        f"batches with Transformers' own recurrence, right but several times slower ({install})",
        flush=True,
    )
