"""The prepare stage: files of conversations -> RUN/data/conversations: checked, exact duplicates
dropped, filtered, split by prompt.

The split is a hash of the prompt: the same prompt is always on the same side, whatever else the
files hold. Records are judged in parallel and pass through once, in order (`Sieve`); what is kept
goes to a scratch file, and from there, once all shares are known, to parts of PART_ROWS.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith import manifest as manifests
from draftsmith import tables
from draftsmith.config import RunConfig, SourceConfig
from draftsmith.core import StageResult, UserError
from draftsmith.files import disk_errors, file_digest, write_atomic
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.parallel import num_workers, ordered_map
from draftsmith.prepare import judge as judging
from draftsmith.prepare.clean import Suites
from draftsmith.prepare.judge import DAMAGED_FILE, Judged, Rules, judge, label
from draftsmith.prepare.records import HUB, Chunk, read_chunks, source_digest
from draftsmith.prepare.select import LEFT_OUT, Sieve, choose, lines_of, render

PART_ROWS = 8192
SMALL_BYTES = 8 << 20  # below this, starting processes costs more than they save
LISTS = {"left-out.jsonl": False, "odd.jsonl": True}  # name -> were its records kept


def folder(cfg: RunConfig) -> Path:
    """Where conversations go."""
    return cfg.root / "data" / "conversations"


def run(cfg: RunConfig) -> StageResult:
    """Read, check, drop duplicates, filter, split, write."""
    out = folder(cfg)
    with stage_report(cfg.root, "prepare") as report:
        manifest = manifests.begin(out, "conversations/2", _inputs(cfg), remake=True)
        if manifest["complete"]:
            return StageResult("prepare", str(out), skipped=True, summary=manifest["counts"])
        for path in out.glob("*.parquet"):
            path.unlink()  # of a run that was killed: the parts of another pass
        report.working(None, "conversations")
        with tempfile.TemporaryDirectory(dir=out, prefix=".pass.", suffix=".tmp") as scratch:
            files, counts = _two_passes(cfg, Path(scratch), out, report)
        manifest = manifests.finish(out, manifest, files, counts)
        print((out / "summary.txt").read_text(), flush=True)
    return StageResult("prepare", str(out), summary=manifest["counts"])


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete output for this configuration, or a UserError."""
    return manifests.required(folder(cfg), "prepare", _inputs(cfg))


def _inputs(cfg: RunConfig) -> dict[str, Any]:
    made_from = _made_from(cfg)
    sources = [
        _source(source, made_from["sources"][n] if made_from else None)
        for n, source in enumerate(cfg.prepare.sources)
    ]
    paths = [Path(path) for path in cfg.prepare.decontaminate]
    if made_from and paths and not any(path.is_file() for path in paths):
        suites = made_from["decontaminate"]
    else:
        suites = [file_digest(path) for path in paths if path.is_file()]
    return {
        **cfg.prepare.model_dump(exclude={"sources", "decontaminate", "workers"}),
        "sources": sources,
        "decontaminate": suites,
        "seed": cfg.seed,
        "regenerate": cfg.regenerate.enabled,
    }


def _made_from(cfg: RunConfig) -> dict[str, Any] | None:
    """What complete conversations of as many sources were made from. Of a run with a mirror, files that
    are gone (it goes on on another machine) count as unchanged: their text is here.
    """
    manifest = manifests.read(folder(cfg))
    if cfg.mirror is None or manifest is None or not manifest["complete"]:
        return None
    inputs = manifest["inputs"]
    return inputs if len(inputs["sources"]) == len(cfg.prepare.sources) else None


def _source(source: SourceConfig, made_from: dict[str, Any] | None) -> dict[str, Any]:
    # The path is left out: a file that moves stays the same data.
    said = {
        **source.model_dump(exclude={"path", "name"}),
        "name": source.name or label(source),
    }
    gone = not source.path.startswith(HUB) and not Path(source.path).exists()
    if gone and made_from is not None and {**made_from, **said} == made_from:
        return made_from
    return {**said, "sha256": source_digest(source)}


def place(cfg: RunConfig, row: dict[str, Any]) -> str:
    """file:line of a conversation, for messages."""
    index, _, number = row["origin"].partition(":")
    return f"{cfg.prepare.sources[int(index)].path}:{number}"


def _two_passes(
    cfg: RunConfig, scratch: Path, out: Path, report: StageReport
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The manifest's files and counts."""
    sieve, forms = Sieve(cfg.prepare), []
    with disk_errors(scratch):
        _first_pass(cfg, sieve, forms, scratch, report)
    totals: Counter[str] = Counter()
    sides = choose(sieve, totals)
    files = _second_pass(scratch, out, sides, sieve)
    totals = sum(sieve.counts.values(), Counter()) + totals
    counts = {key.replace(" ", "_"): value for key, value in totals.items()}
    text = render(sieve.counts, forms, {k: v for k, v in counts.items() if "by_cap" in k})
    write_atomic(out / "summary.txt", lambda path: path.write_text(text))
    for name in LISTS:
        if (scratch / name).stat().st_size:
            (scratch / name).rename(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    for name in ("summary.txt", *LISTS):
        if (out / name).exists():
            path = out / name
            files[name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
    return files, counts


def _first_pass(
    cfg: RunConfig, sieve: Sieve, forms: list[str], scratch: Path, report: StageReport
) -> None:
    sources = cfg.prepare.sources
    Suites(cfg.prepare.decontaminate)  # a fault in them is better found before workers start
    rules = Rules(
        sources=sources,
        seed=cfg.seed,
        keep_answers=not cfg.regenerate.enabled,
        suites=cfg.prepare.decontaminate,
        near_duplicates=cfg.prepare.near_duplicates is not None,
        max_line_bytes=cfg.prepare.max_line_bytes,
    )
    done = 0
    lists = {kept: open(scratch / name, "w") for name, kept in LISTS.items()}  # noqa: SIM115
    chunks = _chunks(cfg, forms)
    with pq.ParquetWriter(scratch / "all.parquet", tables.SCRATCH, compression="lz4") as writer:
        for judged in ordered_map(
            judge, chunks, workers=_workers(cfg), setup=judging.setup, setup_args=(rules,)
        ):
            source = sources[judged.source]
            if judged.bad and cfg.prepare.bad_lines == "refuse":
                _refuse(source, judged)
            kept = sieve.pass_on(judged)
            if kept:
                writer.write_table(judged.table.take(kept))
            for was_kept, file in lists.items():
                for line in lines_of(judged, Path(source.path).name, was_kept):
                    file.write(json.dumps(line) + "\n")
            done += judged.num_read
            report.progress(done)
    for file in lists.values():
        file.close()


def _workers(cfg: RunConfig) -> int:
    paths = [Path(source.path) for source in cfg.prepare.sources]
    local = [path.stat().st_size for path in paths if path.is_file()]
    small = len(local) == len(paths) and sum(local) < SMALL_BYTES
    return 1 if small and cfg.prepare.workers == "auto" else num_workers(cfg.prepare.workers)


def _chunks(cfg: RunConfig, forms: list[str]) -> Iterator[Chunk]:
    for index, source in enumerate(cfg.prepare.sources):
        form = source.format
        empty = True
        for chunk in read_chunks(source, index, cfg.prepare.max_line_bytes):
            if form == "auto":
                form = judging.first_form(chunk)
                forms.append(f"{Path(source.path).name}: {form}, guessed from its first record")
            elif empty:
                forms.append(f"{Path(source.path).name}: {form}")
            empty = False
            yield replace(chunk, form=form)
        if empty:
            raise UserError(
                where=f"{source.path}:1",
                found="an empty file",
                expected="one JSON object a line",
                remedy="Check the file, or leave it out of prepare.sources.",
            )


def _refuse(source: SourceConfig, judged: Judged) -> None:
    number, bad = judged.bad[0]
    mend = f"Mend or delete the {'record' if source.path.startswith(HUB) else 'line'}"
    if bad.kind == DAMAGED_FILE:
        mend = "Copy or make the file again"
    raise UserError(
        where=f"{source.path}:{number}",
        found=bad.found,
        expected=bad.expected,
        remedy=f"{mend}, or set prepare.bad_lines: skip.",
    )


def _second_pass(
    scratch: Path, out: Path, sides: np.ndarray, sieve: Sieve
) -> dict[str, dict[str, Any]]:
    """Write what is kept, numbered, in parts; count it by source."""
    files: dict[str, dict[str, Any]] = {}
    waiting: list[pa.Table] = []
    at = number = rows = 0

    def flush(size: int) -> None:
        nonlocal waiting, rows
        table = pa.concat_tables(waiting)
        name = tables.part_name(len(files))
        files[name] = tables.write_arrow(out / name, table.slice(0, size).combine_chunks())
        waiting, rows = [table.slice(size)], rows - size

    for batch in tables.batches(scratch / "all.parquet", 2048):
        mine = sides[at : at + len(batch)]
        at += len(batch)
        kept = np.flatnonzero(mine != LEFT_OUT)
        if not len(kept):
            continue
        table = _numbered(pa.Table.from_batches([batch]).take(kept), mine[kept], number)
        for name, split in zip(
            table["source"].to_pylist(), table["split"].to_pylist(), strict=True
        ):
            sieve.counts[name][split] += 1
        number, rows = number + len(kept), rows + len(kept)
        waiting.append(table)
        while rows >= PART_ROWS:
            flush(PART_ROWS)
    if rows:
        flush(rows)
    return files


def _numbered(table: pa.Table, sides: np.ndarray, first: int) -> pa.Table:
    split = pa.array(np.where(sides == 1, "held_out", "train").tolist(), pa.string())
    ids = pa.array(np.arange(first, first + len(table), dtype=np.int64))
    columns = {"sample_id": ids, "split": split, **{n: table[n] for n in table.column_names}}
    return pa.table({n: columns[n] for n in tables.CONVERSATIONS.names}, tables.CONVERSATIONS)
