"""Parquet files of conversations, answers and tokens: written aside and renamed, read back as rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.files import file_digest, write_atomic

CONVERSATIONS = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("origin", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("answer", pa.string()),
    ]
)
SCRATCH = pa.schema(
    [CONVERSATIONS.field(n) for n in ("origin", "source", "messages", "tools", "answer")]
)
"""Conversations before it is known which are kept."""
ANSWERS = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("stop_reason", pa.string()),
        ("turn", pa.int32()),
        ("message", pa.string()),
    ]
)
TOKENS = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("source", pa.string()),
        ("split", pa.string()),
    ]
)


def write_table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> dict[str, Any]:
    """Write rows to one Parquet file; its manifest entry."""
    return write_arrow(path, pa.Table.from_pylist(rows, schema=schema))


def write_arrow(path: Path, table: pa.Table) -> dict[str, Any]:
    """Write a table to one Parquet file; its manifest entry."""
    write_atomic(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
    return entry(path, len(table))


def entry(path: Path, num_rows: int | None = None) -> dict[str, Any]:
    """The manifest entry of a Parquet file that exists."""
    if num_rows is None:
        num_rows = pq.read_metadata(path).num_rows
    return {"sha256": file_digest(path), "bytes": path.stat().st_size, "rows": num_rows}


def batches(
    path: Path, num_rows: int, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """A Parquet file in pieces of at most so many rows. Row group by row group: a reader of several
    keeps what it has read.
    """
    file = pq.ParquetFile(path, buffer_size=1 << 20)
    for group in range(file.num_row_groups):
        yield from file.iter_batches(num_rows, row_groups=[group], columns=columns)


def part_name(number: int) -> str:
    """Name of a part of conversations or tokens."""
    return f"part-{number:05d}.parquet"


def num_rows(manifest: dict[str, Any]) -> int:
    """Rows of a complete output."""
    return sum(entry.get("rows", 0) for entry in manifest["files"].values())


def read_column(path: Path, name: str) -> list[Any]:
    """One column of a file."""
    return pq.read_table(path, columns=[name])[name].to_pylist()


def read_rows(folder: Path, manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All rows of a folder, file by file."""
    for name in sorted(manifest["files"]):
        if not name.endswith(".parquet"):
            continue
        for batch in batches(folder / name, 1024):
            yield from batch.to_pylist()
