"""Tokenized samples as a sequence that stays in Arrow's memory: 5 bytes a token, where Python's lists
take over 40. A million samples of a thousand tokens fit into a few GB.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.core import Sample, UserError


class Samples(Sequence[Sample]):
    """The samples of some Parquet files, in order; of one split, or of both."""

    def __init__(self, paths: list[Path], split: str | None = None) -> None:
        tables = []
        for path in paths:
            table = pq.read_table(path)
            keep = table if split is None else table.filter(pc.field("split") == split)
            tables.append(keep)
        self._table = pa.concat_tables(tables)

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return Sample(**{name: self._table[name][at].as_py() for name in self._table.column_names})

    def among(self, sample_ids: Sequence[int]) -> "Samples":
        """Those of them that have one of these ids."""
        keep = np.isin(self._table["sample_id"].to_numpy(), np.array(sample_ids, np.int64))
        out = copy.copy(self)
        out._table = self._table.filter(pa.array(keep))
        return out

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return _lengths(self._table["input_ids"]).to_pylist()

    @property
    def num_anchors(self) -> list[int]:
        """Tokens of each that are supervised and whose next one is."""
        out: list[int] = []
        for chunk in self._table["loss_mask"].chunks:
            mask = chunk.flatten().to_numpy().astype(bool)
            lengths = _lengths(chunk).to_numpy()
            pairs = np.zeros(len(mask) + 1, np.int64)
            pairs[1:-1] = mask[:-1] & mask[1:]  # pairs[i]: tokens i - 1 and i
            ends = np.cumsum(lengths)
            pairs[ends] = 0  # of two samples
            before = np.concatenate([[0], np.cumsum(pairs)])
            out += (before[ends + 1] - before[ends - lengths + 1]).tolist()
        return out

    @property
    def sample_ids(self) -> list[int]:
        """The id of each."""
        return self._table["sample_id"].to_pylist()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError for a token that the target has no embedding row for."""
        for chunk, ids in zip(
            self._table["input_ids"].chunks, self._table["sample_id"].chunks, strict=True
        ):
            values = chunk.flatten().to_numpy()
            if len(values) == 0 or values.max() < vocab_size:
                continue
            at = int(np.argmax(values >= vocab_size))
            ends = np.cumsum(_lengths(chunk).to_numpy())
            sample_id = ids[int(np.searchsorted(ends, at, side="right"))].as_py()
            raise UserError(
                where=f"sample {sample_id}",
                found=f"token {values[at]}",
                expected=f"ids below {vocab_size}, the rows of the target's embedding",
                remedy="Use the target's own tokenizer.",
            )


def _lengths(lists: Any) -> Any:
    return pc.call_function("list_value_length", [lists])
