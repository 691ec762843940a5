"""Before the work: on the loaded weights and the kernels of this machine, a packed row gives each sample
what it gets alone.

Two comparisons, each against the noise floor, the difference that two other batchings of the same
samples show (alone, and as one right-padded batch). A packed row against packed rows of one
sample: the same kernels, so what differs has leaked; a convolution or a state that runs on shows at
a sample's first tokens, in the first layers. And packed alone against plain Transformers alone: the
kernels themselves. Positions that run on would change nothing in rotary attention, so they are
read where they enter the rotary embedding.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftsmith.core import FaultFound, Sample
from draftsmith.target.forward import StatesForward

LENGTHS = (61, 190, 7, 128, 33)  # of the pieces of real samples that are compared
FIRST = 4  # tokens at a sample's start: what a convolution of width 4 can leak into, and one more
TIMES_THE_FLOOR = 4.0
EQUAL = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative difference that no leak is as small as, and other batch shapes may make."""


def self_test(forward: StatesForward, samples: list[Sample]) -> dict[str, list[float]]:
    """Compare; the worst relative differences a tap. Raises FaultFound when rows leak or a kernel is
    wrong.
    """
    pieces = [_piece(samples[i % len(samples)], n) for i, n in enumerate(LENGTHS)]
    lengths = [len(p.input_ids) for p in pieces]
    row_tokens = max(forward.row_tokens or 0, sum(lengths))
    with _positions(forward) as seen:
        packed = _hidden(forward, pieces, row_tokens)
    _check_positions(seen, lengths)
    batch = _hidden(forward, pieces, None)
    leaks, kernels, floors = [], [], []
    for i, piece in enumerate(pieces):
        plain, alone = _hidden(forward, [piece], None)[0], _hidden(forward, [piece], row_tokens)[0]
        floors.append(_difference(batch[i], plain))
        leaks.append(_difference(packed[i], alone))
        kernels.append(_difference(alone, plain))
    worst = {name: torch.stack(all_).amax(0).tolist() for name, all_ in
             (("packed", leaks), ("kernels", kernels), ("noise_floor", floors))}  # fmt: skip
    _judge(forward, worst)
    return {name: [round(x, 6) for x in taps] for name, taps in worst.items()}


def _judge(forward: StatesForward, worst: dict[str, list[float]]) -> None:
    equal = EQUAL[forward.model.dtype]
    for tap, leak, kernel, floor in zip(forward.taps, *worst.values(), strict=True):
        wrong = None
        if not leak <= TIMES_THE_FLOOR * floor + equal:
            wrong = (
                f"a sample in a packed row differs from the same sample alone by {leak:.1%}: a "
                "convolution, a recurrent state or attention runs on over the samples' boundaries"
            )
        elif not kernel <= TIMES_THE_FLOOR * (floor + equal):
            wrong = f"a packed sample differs from plain Transformers by {kernel:.1%}: a kernel is wrong here"
        if wrong:
            raise FaultFound(
                f"self-test of packed rows, tap {tap}: {wrong} (two batchings of plain Transformers "
                f"differ by {floor:.1%}). Update fla-core and Transformers, or use extract.rows: padded."
            )


def _piece(sample: Sample, length: int) -> Sample:
    ids = sample.input_ids[:length]
    return Sample(sample.sample_id, ids, [0] * len(ids))


def _hidden(forward: StatesForward, pieces: list[Sample], row_tokens: int | None) -> list[Tensor]:
    states = forward.launch(pieces, row_tokens)
    return [f.hidden.float().clone() for f in states.features()]


def _difference(mine: Tensor, alone: Tensor) -> Tensor:
    """|mine - alone| / |alone| at each tap of [n, taps, H]: of the first tokens, or of the rest."""
    apart, size = (x.pow(2).sum(-1) for x in (mine - alone, alone))
    parts = [slice(0, FIRST), slice(FIRST, None)] if len(mine) > FIRST else [slice(None)]
    return torch.stack([(apart[p].sum(0) / size[p].sum(0)).sqrt() for p in parts]).amax(0)


@contextlib.contextmanager
def _positions(forward: StatesForward) -> Iterator[list[Tensor]]:
    """What enters the decoder's rotary embedding while the block lasts."""
    seen: list[Tensor] = []

    def look(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if torch.is_tensor(positions):
            seen.append(positions)

    rotary: Any = getattr(forward.decoder, "rotary_emb", None)
    if rotary is None:
        yield seen
        return
    handle = rotary.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _check_positions(seen: list[Tensor], lengths: list[int]) -> None:
    want = torch.cat([torch.arange(n) for n in lengths])
    for positions in seen:
        if (positions[..., : len(want)].cpu() != want).any():
            raise FaultFound(
                "self-test of packed rows: positions run on over the samples' boundaries, where each "
                "sample must start at 0. Update Transformers, or use extract.rows: padded."
            )
