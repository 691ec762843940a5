"""Held-out tau while training goes on, without a decode loop: what greedy decoding would accept along
texts that the target has already written.

As decode/replay.py, but through the trainer's own forward, sharded and compiled as it is, all ranks
together. Beside it stand prompt lookup, the weights that training began with, and the same drafter fed
another text's features: what it must beat to be worth its hours.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftsmith import files
from draftsmith.core import Sample
from draftsmith.decode.propose import LookupProposer
from draftsmith.decode.replay import Replay, replay_of, walk
from draftsmith.features import FeatureBatch, Source
from draftsmith.monitor.state import Report
from draftsmith.ranks import Ranks

NAME = "verdicts.json"
FIRST = 0.01  # of the steps, before the first verdict
EARLIEST = 100  # steps
LONGEST = 512  # tokens of an answer that are looked at
SURE = 0.05  # of the steps: before, nothing is said of features that teach nothing
LATE = 0.25  # of the steps: before, prompt lookup may still be better

Hits = Callable[[FeatureBatch | None, np.ndarray | None, Tensor | None], Tensor]
"""(a row of one text, anchors, other features or None) -> [A, B] whether each slot is the text's token;
a row of None takes part in what all ranks do together.
"""


@dataclass
class Rounds:
    """Tokens emitted and rounds, over texts."""

    tokens: int = 0
    rounds: int = 0

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return self.tokens / max(1, self.rounds)

    def add(self, walked: Replay) -> None:
        """One text's rounds."""
        self.tokens, self.rounds = (
            self.tokens + sum(walked.emitted),
            self.rounds + len(walked.emitted),
        )


def answer_of(sample: Sample) -> tuple[int, int]:
    """The first answer's tokens [first, end), at most LONGEST."""
    mask = [*sample.loss_mask, 0]
    first = mask.index(1)
    return first, min(mask.index(0, first), first + LONGEST)


def lookup_tau(samples: Sequence[Sample], block_size: int) -> float:
    """Prompt lookup on the same texts."""
    rounds = Rounds()
    for sample in samples:
        first, end = answer_of(sample)
        nothing = torch.empty(end, 0)  # it looks at tokens alone
        rounds.add(
            replay_of(LookupProposer(block_size - 1), sample.input_ids[:end], first, nothing)
        )
    return rounds.tau


class Judge:
    """Measures held-out texts while training goes on; every rank takes its share of them. Verdicts are
    kept in `out`/verdicts.json, so that a run that goes on knows them.
    """

    def __init__(
        self,
        out: Path,
        samples: Sequence[Sample],
        source: Source,
        hits: Hits,
        *,
        block_size: int,
        blocks_together: int,
        num_steps: int,
        report: Report,
        ranks: Ranks,
    ) -> None:
        self._path, self._samples, self._source, self._hits = out / NAME, samples, source, hits
        self._together, self._num_steps = blocks_together, num_steps
        self._report, self._ranks = report, ranks
        self._said: str | None = None
        self.first = max(1, round(FIRST * num_steps))
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._steps: dict[str, dict[str, float]] = found.get("steps", {})
        self._saved: list[int] = found.get("saved", [])
        self._baselines: dict[str, float] = found.get("baselines", {})
        if samples and not self._baselines:
            self._baselines["tau_lookup"] = lookup_tau(samples, block_size)

    @property
    def best(self) -> int | None:
        """The step of the saved checkpoint with the highest tau."""
        return max(self._saved, key=lambda step: self._steps[str(step)]["tau"], default=None)

    def before(self) -> None:
        """Measure the weights that training begins with: those of drafter.init_from."""
        if self._samples:
            self._baselines["tau_init"] = self.measure()["tau"]

    def at(self, step: int, *, saved: bool) -> dict[str, float]:
        """Measure after this step, tell, and say so when the training will not be worth its hours."""
        if not self._samples:
            return {}
        numbers = {**self.measure(), **self._baselines}
        self._steps[str(step)] = numbers
        self._saved += [step] if saved else []
        self._report.event("verdict", step=step, **numbers)
        said = worth(numbers, step / self._num_steps) if step >= EARLIEST else None
        if self._ranks.lead:
            kept = {"steps": self._steps, "saved": self._saved, "baselines": self._baselines}
            files.write_json(self._path, kept)
            if said and said[0] != self._said:
                self._report.event("not_worth_it", step=step, why=said[0], said=said[1])
                print(f"train: step {step}: {said[1]}", flush=True)
            self._said = said[0] if said else None
        return numbers

    def measure(self) -> dict[str, float]:
        """tau and, of the same drafter on another text's features, tau_shuffled."""
        counted = (
            torch.tensor(  # of no text at all on a rank, where there are more ranks than texts
                [[r.tokens, r.rounds] for pair in self.texts().values() for r in pair],
                dtype=torch.long,
            )
        )
        sums = self._ranks.sum(counted.view(-1, 2, 2).sum(0))
        own, other = (Rounds(*row) for row in sums.tolist())
        return {"tau": own.tau, "tau_shuffled": other.tau}

    def texts(self) -> dict[int, tuple[Rounds, Rounds]]:
        """Of this rank's texts, by place: the walk with its own features and with another text's."""
        mine = list(range(self._ranks.rank, len(self._samples), self._ranks.count))
        jobs = list(self._jobs(mine))
        most = torch.tensor([len(jobs)])
        if self._ranks.count > 1:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        accepted: dict[int, tuple[list[int], list[int]]] = {}
        for k in range(int(most)):
            i, batch, anchors, shuffled = jobs[k] if k < len(jobs) else (-1, None, None, None)
            for which, features in enumerate((None, shuffled)):
                correct = self._hits(batch, anchors, features)
                if batch is not None:
                    kept = correct[:, 1:].cumprod(-1).sum(-1).tolist()
                    accepted.setdefault(i, ([], []))[which].extend(kept)
        walks = {i: (Rounds(), Rounds()) for i in accepted}
        for i, lists in accepted.items():
            first, end = answer_of(self._samples[i])
            for rounds, of_text in zip(walks[i], lists, strict=True):
                rounds.add(walk(lambda at, kept=of_text, begin=first: kept[at - begin], first, end))
        return walks

    def _jobs(self, mine: list[int]) -> Iterator[tuple[int, FeatureBatch, np.ndarray, Tensor]]:
        """Texts' anchors, so many together; and the features of another text, the one before."""
        rows = [[i] for i in mine]
        before = None
        last = self._source.batches(rows[-1:], pinned=False)
        for i, batch in zip(mine, self._source.batches(rows, pinned=False), strict=True):
            assert batch is not None, "every text has tokens"
            if before is None:
                before = next(filter(None, last)).hidden
            first, end = answer_of(self._samples[i])
            mask = torch.zeros_like(batch.loss_mask)
            mask[first:end] = 1
            text = replace(batch, loss_mask=mask)
            other = before[torch.arange(len(batch.hidden), device=before.device) % len(before)]
            for begin in range(first, end - 1, self._together):
                yield i, text, np.arange(begin, min(begin + self._together, end - 1)), other
            before = batch.hidden


def worth(numbers: dict[str, float], share_of_steps: float) -> tuple[str, str] | None:
    """What is to be said of a training that will not be worth its hours, if anything: the kind, and a
    sentence.
    """
    tau, shuffled = numbers["tau"], numbers["tau_shuffled"]
    if share_of_steps >= SURE and tau <= 1.02 * shuffled:
        return "features", (
            f"held-out tau {tau:.2f} is no better with the text's own features than with another "
            f"text's ({shuffled:.2f}): the drafter learns nothing from them. Stop, and check the "
            "features (`draftsmith verify STORE --recompute 4`) and taps"
        )
    if share_of_steps >= SURE and tau < numbers.get("tau_init", 0.0):
        return "init_from", (
            f"held-out tau {tau:.2f} is below that of drafter.init_from ({numbers['tau_init']:.2f}): "
            "training makes it worse. Lower train.lr, or check that the data are the target's answers"
        )
    if share_of_steps >= LATE and tau < numbers["tau_lookup"]:
        return "lookup", (
            f"held-out tau {tau:.2f} is below prompt lookup's {numbers['tau_lookup']:.2f} after "
            f"{share_of_steps:.0%} of the steps: more data or steps are needed to be worth serving"
        )
    return None
