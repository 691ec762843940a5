"""Which of the conversations that were read are kept: exact duplicates, weights, filters and near
duplicates as they come (`Sieve`); caps and the split when all are known (`choose`).
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from draftsmith.config import PrepareConfig
from draftsmith.core import UserError
from draftsmith.prepare.clean import NearDuplicates
from draftsmith.prepare.judge import Judged, label

Counts = dict[str, Counter[str]]
"""By the name of a source: how many of its records were read, left out for which reason, kept."""
HELD_OUT, TRAIN, LEFT_OUT = 1, 0, -1


class Sieve:
    """Remembers 16 bytes of each conversation, its hashes and its source: about 150 bytes each."""

    def __init__(self, cfg: PrepareConfig) -> None:
        self.cfg = cfg
        self.counts: Counts = {}
        self.shares = array("d")
        self.picks = array("d")
        self.sources = array("H")
        self._seen: set[bytes] = set()
        self._ids: list[set[int]] = [set() for _ in cfg.sources]
        self._near = NearDuplicates(cfg.near_duplicates) if cfg.near_duplicates else None

    def pass_on(self, judged: Judged) -> list[int]:
        """Positions of the chunk's conversations that are kept so far."""
        source = self.cfg.sources[judged.source]
        names = judged.table.column("source").to_pylist()
        for what in ("read", "bad") if judged.bad else ():
            self._count(label(source), len(judged.bad), what)
        kept = []
        for i, name in enumerate(names):
            self._count(name, 1, "read")
            reason = self._reason(judged, i, source.weight)
            if reason:
                self._count(name, 1, reason)
                continue
            kept.append(i)
            self.shares.append(judged.shares[i])
            self.picks.append(judged.picks[i])
            self.sources.append(judged.source)
        self._note_ids(judged)
        for _, kind in judged.odd:
            self._count(label(source), 1, kind)
        return kept

    def _count(self, name: str, number: int, what: str) -> None:
        self.counts.setdefault(name, Counter())[what] += number

    def _reason(self, judged: Judged, i: int, weight: float) -> str | None:
        if judged.whole[i] in self._seen:
            return "duplicates"
        if judged.picks[i] >= weight:
            return "left_out_by_weight"
        if judged.dropped[i]:
            return judged.dropped[i]
        self._seen.add(judged.whole[i])  # what is left out hides no copy in a source of other rules
        if self._near and not self._near.add(judged.sketches[i]):
            return "near duplicates"
        return None

    def _note_ids(self, judged: Judged) -> None:
        seen = self._ids[judged.source]
        for number, mark in zip(judged.numbers, judged.ids, strict=True):
            if mark in seen:
                judged.odd.append((number, "an id that an earlier record has"))
            elif mark is not None:
                seen.add(mark)
        judged.odd.sort()


def choose(sieve: Sieve, totals: Counter[str]) -> np.ndarray:
    """For each conversation TRAIN, HELD_OUT or LEFT_OUT [n], by the caps; at least one is held out
    when a share was asked for.
    """
    cfg = sieve.cfg
    shares, picks, sources = map(np.array, (sieve.shares, sieve.picks, sieve.sources))
    sides = np.where(shares < cfg.held_out, HELD_OUT, TRAIN).astype(np.int8)
    for index, source in enumerate(cfg.sources):
        # not by the split's hash: the lowest of that are all held out
        _cap(sides, picks, sources == index, source.max_samples, totals, "source")
    if cfg.held_out and len(shares) and not (sides == HELD_OUT).any():
        left = sides != LEFT_OUT
        sides[left & (shares == shares[left].min())] = HELD_OUT
    _cap(sides, shares, sides == TRAIN, cfg.max_samples, totals, "train")
    _cap(sides, shares, sides == HELD_OUT, cfg.max_held_out, totals, "held_out")
    if not (sides == TRAIN).any():
        raise UserError(
            where="prepare.sources",
            found=f"no conversation for training ({_said(sieve, sides)})",
            expected="at least one",
            remedy="Add or mend data (prepare.bad_lines: refuse names the first fault), or lower prepare.held_out.",
        )
    return sides


def _said(sieve: Sieve, sides: np.ndarray) -> str:
    counts = {**sum(sieve.counts.values(), Counter()), "held out": int((sides == HELD_OUT).sum())}
    return ", ".join(f"{number:,} {what.replace('_', ' ')}" for what, number in counts.items())


def _cap(
    sides: np.ndarray,
    hashes: np.ndarray,
    mine: np.ndarray,
    most: int | None,
    totals: Counter[str],
    name: str,
) -> None:
    positions = np.flatnonzero(mine)
    if most is None or len(positions) <= most:
        return
    order = np.argsort(hashes[positions], kind="stable")
    sides[positions[order[most:]]] = LEFT_OUT
    totals[f"left_out_by_cap_{name}"] += len(positions) - most


def render(counts: Counts, forms: list[str], totals: dict[str, Any]) -> str:
    """The summary that people read: a table by source."""
    names = list(dict.fromkeys(key for mine in counts.values() for key in mine))
    last = ["train", "held_out"]
    columns = ["read", *(n for n in names if n not in ("read", *last)), *last]
    lines = ["# Conversations", ""]
    lines += forms
    width = max([len("source"), len("all"), *map(len, counts)])
    lines += ["", f"{'source':<{width}}  " + "  ".join(columns)]
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    for name, mine in rows:
        cells = "  ".join(f"{mine[column]:>{len(column)},}" for column in columns)
        lines.append(f"{name:<{width}}  {cells}")
    lines += ["", *(f"{key}: {value:,}" for key, value in totals.items())]
    return "\n".join(lines) + "\n"


def lines_of(judged: Judged, name: str, kept: bool) -> Iterator[dict[str, Any]]:
    """What left-out.jsonl and odd.jsonl say of a chunk."""
    if kept:
        yield from ({"where": f"{name}:{n}", "kind": kind} for n, kind in judged.odd)
        return
    for number, bad in judged.bad:
        yield {
            "where": f"{name}:{number}",
            "kind": bad.kind,
            "found": bad.found[:300],
            "expected": bad.expected,
        }
