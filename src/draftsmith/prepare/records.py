"""Files of conversations -> chunks of raw records, streaming: JSON lines, a JSON array, Parquet,
Arrow, or a data set of the `datasets` library. Nothing is judged here but what cannot be read.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftsmith.config import SourceConfig
from draftsmith.core import UserError
from draftsmith.files import file_digest
from draftsmith.tables import batches

HUB = "hub:"
CHUNK_BYTES, CHUNK_LINES, CHUNK_ROWS = 1 << 20, 2048, 512
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, OSError, pa.ArrowInvalid)


@dataclass(frozen=True)
class Chunk:
    """Records `first`, `first + 1` ... of a source: `lines` of bytes (None: longer than allowed), or
    rows of an Arrow table, or plain objects. `damage` is why the file cannot be read after them;
    `form` is what `formats` calls their shape.
    """

    source: int
    first: int
    lines: list[bytes | None] | None = None
    table: pa.Table | None = None
    objects: list[Any] | None = None
    damage: str | None = None
    form: str = "messages"

    def __len__(self) -> int:
        records = next(r for r in (self.lines, self.table, self.objects) if r is not None)
        return len(records)


def source_digest(source: SourceConfig) -> str:
    """What identifies a source's data: a file's SHA-256, a hub data set's commit."""
    if source.path.startswith(HUB):
        return _hub_digest(source)
    path = Path(source.path)
    if not path.is_file():
        raise UserError(
            where=f"prepare.sources: {path}",
            found="a folder" if path.is_dir() else "no such file",
            expected="a file of conversations",
            remedy=f"Name its files one by one; a folder of a hub data set is {HUB}{path}."
            if path.is_dir()
            else "Check the path.",
        )
    return file_digest(path)


def read_chunks(source: SourceConfig, index: int, max_line_bytes: int) -> Iterator[Chunk]:
    """All records of a source."""
    if source.path.startswith(HUB):
        yield from _number(_hub_tables(source), index)
        return
    path = Path(source.path)
    suffixes = [s for s in path.suffixes if s not in (".gz", ".zst")]
    kind = suffixes[-1] if suffixes else ""
    if kind == ".parquet":
        yield from _number(_guarded(path, lambda: _parquet(path)), index)
    elif kind == ".arrow":
        yield from _number(_guarded(path, lambda: _arrow(path)), index)
    elif kind == ".json" and _begins_with_bracket(path):
        yield from _array(path, index, max_line_bytes)
    else:
        yield from _lines(path, index, max_line_bytes)


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # a GzipFile
    if path.suffix == ".zst":
        return io.BufferedReader(pa.input_stream(path, compression="zstd"), 1 << 20)
    return open(path, "rb")


def _lines(path: Path, index: int, limit: int) -> Iterator[Chunk]:
    lines: list[bytes | None] = []
    number, size, damage = 0, 0, None
    with _open(path) as file:
        while True:
            try:
                line = file.readline(limit + 2)
                if len(line) > limit and not line.endswith(b"\n"):
                    while len(rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                        pass
                    lines.append(None)
                elif line:
                    lines.append(line)
            except DAMAGED as error:
                line, damage = b"", f"a damaged file ({error or type(error).__name__})"
                if path.suffix == ".gz":
                    damage = f"a damaged gzip file ({error})"
            size += len(line)
            if not line or len(lines) >= CHUNK_LINES or size >= CHUNK_BYTES:
                if lines or damage:
                    yield Chunk(index, number + 1, lines=lines, damage=damage)
                number, size, lines = number + len(lines), 0, []
            if not line:
                return


def _begins_with_bracket(path: Path) -> bool:
    with _open(path) as file:
        try:
            return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        except DAMAGED:
            return False  # the reader of lines will name the damage


def _array(path: Path, index: int, limit: int) -> Iterator[Chunk]:
    """The elements of one JSON array, read piece by piece; they are numbered as lines are."""
    decoder = json.JSONDecoder()
    objects: list[Any] = []
    number, damage, begun = 0, None, False
    with _open(path) as raw:
        text = io.TextIOWrapper(raw, "utf-8-sig")  # type: ignore[arg-type]
        buffer, ended = "", False
        while damage is None:
            buffer = buffer.lstrip(" \t\r\n," if begun and objects or number else " \t\r\n")
            if not begun and buffer:
                buffer, begun = buffer[1:], True
                continue
            if buffer.startswith("]"):
                if buffer[1:].strip() or text.read(1 << 16).strip():
                    damage = "text after the end of the array"
                break
            try:
                value, end = decoder.raw_decode(buffer)
                if end == len(buffer) and not ended:
                    raise ValueError("perhaps cut in two")
                objects.append(value)
                buffer = buffer[end:]
            except (ValueError, RecursionError) as error:
                if ended or len(buffer) > limit or isinstance(error, RecursionError):
                    damage = f"an element that is not JSON ({error})"
                    continue
                try:
                    more = text.read(max(1 << 20, len(buffer)))
                except (*DAMAGED, UnicodeDecodeError) as broken:
                    damage = f"a damaged file ({broken})"
                    continue
                buffer, ended = buffer + more, not more
            if len(objects) >= CHUNK_ROWS:
                yield Chunk(index, number + 1, objects=objects)
                number, objects = number + len(objects), []
    if objects or damage:
        yield Chunk(index, number + 1, objects=objects, damage=damage)


def _parquet(path: Path) -> Iterator[pa.Table]:
    for batch in batches(path, CHUNK_ROWS):
        yield pa.Table.from_batches([batch])


def _arrow(path: Path) -> Iterator[pa.Table]:
    """An Arrow file, or the stream that `datasets` caches."""
    with pa.memory_map(str(path)) as file:
        try:
            reader: Any = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            batches = iter(pa.ipc.open_stream(file))
        for batch in batches:
            for at in range(0, batch.num_rows, CHUNK_ROWS):
                yield pa.Table.from_batches([batch.slice(at, CHUNK_ROWS)])


def _guarded(path: Path, read: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
    try:
        yield from read()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            where=str(path),
            found=f"a damaged file ({' '.join(str(error).split())[:200]})",
            expected=f"a whole {path.suffix} file",
            remedy="Copy or download it again, or leave it out of prepare.sources.",
        ) from None


def _number(tables: Iterator[pa.Table], index: int) -> Iterator[Chunk]:
    number = 0
    for table in tables:
        if len(table):
            yield Chunk(index, number + 1, table=table)
        number += len(table)


def _hub_digest(source: SourceConfig) -> str:
    name = source.path.removeprefix(HUB)
    if Path(name).is_dir():
        files = sorted(p for p in Path(name).rglob("*") if p.is_file())
        return json.dumps([[str(p.relative_to(name)), file_digest(p)] for p in files])
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        commit = HfApi().dataset_info(name, revision=source.revision).sha
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise UserError(
            where=f"prepare.sources: {source.path}",
            found=f"no answer from the hub ({' '.join(str(error).split())[:200]})",
            expected="a data set's name",
            remedy="Check name, revision and network; a folder also works: hub:FOLDER.",
        ) from None
    assert commit, "the hub names the commit of a revision"
    return f"{commit}/{source.subset}/{source.split}"


def _hub_tables(source: SourceConfig) -> Iterator[pa.Table]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            where=f"prepare.sources: {source.path}",
            found="no `datasets` library",
            expected="it, to read hub data sets",
            remedy="pip install 'draftsmith[hub]'.",
        ) from None
    name = source.path.removeprefix(HUB)
    try:
        stream = datasets.load_dataset(
            name,
            source.subset,
            split=source.split,
            streaming=True,
            revision=None if Path(name).is_dir() else source.revision,
        )
        for batch in stream.with_format("arrow").iter(CHUNK_ROWS):
            yield batch if isinstance(batch, pa.Table) else pa.table(batch)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            where=f"prepare.sources: {source.path}",
            found=f"a data set that does not load ({' '.join(str(error).split())[:200]})",
            expected="a data set with this subset and split",
            remedy="Check subset, split, revision and network.",
        ) from None
