"""The row plan: which samples share a batch. A pure function of lengths, seed and budget, so a
resumed run makes the same.
"""

import bisect
import heapq

import numpy as np

from draftsmith.core import RowPlan


def plan_rows(lengths: list[int], *, tokens_per_batch: int, seed: int) -> RowPlan:
    """Length-bucketed batches of at most `tokens_per_batch` tokens, padding included; a longer
    sample goes alone.

    Samples of like length share a row (right-padded, so exact for causal models), ties and the
    order of rows are shuffled by seed, so that any run of rows holds every length.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(lengths))
    order = sorted(shuffled.tolist(), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    for i in order:
        if rows and lengths[rows[-1][0]] * (len(rows[-1]) + 1) <= tokens_per_batch:
            rows[-1].append(i)
        else:
            rows.append([i])
    rows = [rows[r] for r in rng.permutation(len(rows)).tolist()]
    padded = sum(lengths[row[0]] * len(row) for row in rows)
    return RowPlan(rows=rows, num_tokens=sum(lengths), padded_tokens=padded)


WINDOW_ROWS = 64  # rows filled side by side: enough choice to leave under 1% empty
FULL = 0.985  # of a window's rows when it is levelled: the rest lets short samples find a place
TURN_ROWS = (
    2  # that live training has computed at a time: with more they are fuller, and take more memory
)


def plan_packed_rows(lengths: list[int], *, tokens_per_batch: int, seed: int) -> RowPlan:
    """Rows of at most `tokens_per_batch` tokens, samples laid end to end; a longer sample goes alone.

    Best fit decreasing within windows of shuffled samples, so that any run of rows holds every
    length; a row that is not nearly full at a window's end takes part in the next. 98% full or
    better but for the last window, unless most samples are longer than half a row.
    """
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    pool: list[int] = []
    held = 0
    for i in rng.permutation(len(lengths)).tolist():
        if lengths[i] >= tokens_per_batch:
            rows.append([i])
            continue
        pool.append(i)
        held += lengths[i]
        if held >= WINDOW_ROWS * tokens_per_batch:
            packed = _best_fit(pool, lengths, tokens_per_batch)
            full = [row for row in packed if _tokens(row, lengths) >= 0.99 * tokens_per_batch]
            rows += full
            done = {i for row in full for i in row}
            pool = [i for i in pool if i not in done]
            held = _tokens(pool, lengths)
            if not full:  # samples that do not fill rows: give up on them rather than go round
                rows += packed
                pool, held = [], 0
    rows += _best_fit(pool, lengths, tokens_per_batch)
    return _shuffled(rows, lengths, tokens_per_batch, rng)


def plan_mixed_rows(lengths: list[int], *, tokens_per_batch: int, seed: int) -> RowPlan:
    """The same, with short and long samples in every row: in windows of shuffled samples, longest first, each
    into the row with the most room.
    """
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    pool: list[int] = []
    held = 0
    for i in rng.permutation(len(lengths)).tolist():
        pool.append(i)
        held += min(lengths[i], tokens_per_batch)
        if held >= FULL * WINDOW_ROWS * tokens_per_batch:
            rows += _levelled(pool, lengths, tokens_per_batch)
            pool, held = [], 0
    rows += _levelled(pool, lengths, tokens_per_batch)
    return _shuffled(rows, lengths, tokens_per_batch, rng)


def joined_rows(
    groups: list[list[int]], lengths: list[int], *, tokens_per_batch: int
) -> list[list[int]]:
    """The groups' samples in few rows: by best fit, or whole groups one after another where that takes fewer."""
    fitted = _best_fit([i for group in groups for i in group], lengths, tokens_per_batch)
    whole: list[list[int]] = []
    for group in groups:
        if whole and _tokens(whole[-1] + group, lengths) <= tokens_per_batch:
            whole[-1] = whole[-1] + group
        elif group:
            whole.append(list(group))
    if any(_tokens(group, lengths) > tokens_per_batch for group in groups):
        return fitted
    return min(fitted, whole, key=len)


def _shuffled(
    rows: list[list[int]], lengths: list[int], budget: int, rng: np.random.Generator
) -> RowPlan:
    rows = [rows[r] for r in rng.permutation(len(rows)).tolist()]
    padded = sum(max(budget, _tokens(row, lengths)) for row in rows)
    return RowPlan(rows=rows, num_tokens=sum(lengths), padded_tokens=padded)


def _levelled(pool: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """As few rows as these may fit into, and more for what does not."""
    count = -(-sum(min(lengths[i], budget) for i in pool) // budget)
    room = [(-budget, row) for row in range(count)]  # a heap: the most room first
    rows: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(pool, key=lambda i: (-lengths[i], i)):
        left, row = room[0]
        if lengths[i] <= -left or not rows[row]:
            rows[row].append(i)
            heapq.heapreplace(room, (min(0, left + lengths[i]), row))
        else:
            heapq.heappush(room, (min(0, lengths[i] - budget), len(rows)))
            rows.append([i])
    return [row for row in rows if row]


def _tokens(row: list[int], lengths: list[int]) -> int:
    return sum(lengths[i] for i in row)


def _best_fit(pool: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """Longest first, each into the row with the least room that it fits in."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in sorted(pool, key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[i], -1))
        if at == len(room):
            rows.append([i])
            bisect.insort(room, (budget - lengths[i], len(rows) - 1))
        else:
            left, row = room.pop(at)
            rows[row].append(i)
            bisect.insort(room, (left - lengths[i], row))
    return rows
