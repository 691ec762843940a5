"""What stops a training that cannot be good: features that are dead, numbers that are not finite,
gradients that explode. Each error says which samples and what their states look like.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NoReturn

import torch
from torch import Tensor

from draftsmith.core import UserError
from draftsmith.features import FeatureBatch
from draftsmith.ranks import Ranks

SAME = 1e-6  # relative difference under which two things are one
EXPLODED = 100.0  # times the usual norm
IN_A_ROW = 5
USUAL = 100  # steps whose median is the usual norm


def tap_statistics(hidden_NKH: Tensor, taps: Sequence[int]) -> str:
    """Of each tap: root mean square, largest magnitude, and rows that are zero or not finite."""
    out = []
    for tap, states in zip(taps, hidden_NKH.float().unbind(1), strict=True):
        bad = (~torch.isfinite(states).all(-1)).sum().item()
        zero = (states == 0).all(-1).sum().item()
        rms, most = states.square().mean().sqrt().item(), states.abs().max().item()
        out.append(f"tap {tap}: rms {rms:.3g}, max {most:.3g}, {zero} zero and {bad} not finite of "
                   f"{len(states)}")  # fmt: skip
    return "; ".join(out)


def check_alive(batch: FeatureBatch, taps: Sequence[int]) -> None:
    """Raise UserError when the first features that training sees tell nothing: a tap that is zero or
    constant over tokens, or two taps that are one.
    """
    states = batch.hidden.float()
    size = states.square().mean((0, 2)).sqrt()
    wrong = None
    for k, tap in enumerate(taps):
        of_tap = states[:, k]
        spread = (of_tap - of_tap.mean(0)).square().mean().sqrt()
        if not math.isfinite(size[k].item()):
            wrong = f"tap {tap} is not finite"
        elif size[k] == 0:
            wrong = f"tap {tap} is zero everywhere"
        elif len(of_tap) > 1 and spread <= SAME * size[k]:
            wrong = f"tap {tap} is the same at every token"
        for j in range(k):
            if wrong is None and (of_tap - states[:, j]).square().mean().sqrt() <= SAME * size[k]:
                wrong = f"taps {taps[j]} and {tap} hold the same states"
        if wrong:
            raise UserError(
                where="train step 1",
                found=f"features of samples {batch.sample_ids[:5]} that teach nothing: {wrong} "
                f"({tap_statistics(states, taps)})",
                expected="states that differ from token to token and from tap to tap",
                remedy="Check them with `draftsmith verify STORE --recompute 4`, and extract again.",
            )


def alive(
    batches: Iterator[FeatureBatch | None], taps: Sequence[int]
) -> Iterator[FeatureBatch | None]:
    """The same batches, the first of them checked."""
    for number, batch in enumerate(batches):
        if number == 0 and batch is not None:
            check_alive(batch, taps)
        yield batch


class Gradients:
    """Watches the norm, step by step."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=USUAL)
        self._high = 0

    def wrong(self, norm: float, loss: float) -> str | None:
        """What is wrong with this step, if anything: not finite, or far above the usual norm for
        several steps (one alone is clipped, and harmless).
        """
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return f"loss {loss:.4g}, gradient norm {norm:.4g}"
        usual = median(self._norms) if len(self._norms) >= 20 else math.inf
        self._high = self._high + 1 if norm > EXPLODED * usual else 0
        if self._high >= IN_A_ROW:
            return f"gradient norm {norm:.4g} and as high for {IN_A_ROW} steps, usually {usual:.4g}"
        self._norms.append(norm)
        return None


def refuse(
    number: int, wrong: str, batches: Sequence[FeatureBatch], taps: Sequence[int], ranks: Ranks
) -> NoReturn:
    """Raise UserError for step `number` (from 1) with the samples and states of a rank, all ranks together:
    of one whose states are not finite, or else of the first that had a row.
    """
    mine = None
    if batches:
        states = torch.cat([batch.hidden.float().cpu() for batch in batches])
        ids = [i for batch in batches for i in batch.sample_ids]
        mine = (bool(states.isfinite().all()), ids[:20], tap_statistics(states, taps))
    every = [found for found in ranks.gather(mine) if found]
    _, ids, statistics = min(every, key=lambda found: found[0])
    raise UserError(
        where=f"train step {number}",
        found=f"{wrong} on samples {ids} ({statistics})",
        expected="finite numbers, and gradients like those before",
        remedy="Lower train.lr, or look at these samples (`draftsmith inspect`, `draftsmith verify`); "
        "the same command goes on from the last checkpoint.",
    )
