"""The row plan: which samples share a batch. A pure function of lengths, seed and budget, so a
resumed run makes the same.
"""

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
