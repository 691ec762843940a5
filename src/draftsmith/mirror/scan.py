"""What of a run's folder is mirrored, and how it is at one moment.

A unit is what one stage writes; its marker (a manifest, or export.json) says what it was made from.
Writers replace the marker before they write files for other inputs, so a listing between two
readings of the same marker belongs to it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

MARKERS = {
    **{
        folder: f"{folder}/manifest.json"
        for folder in ("data/conversations", "data/answers", "data/tokens", "checkpoints", "eval")
    },
    "export": "export.json",
    "": None,
}
"""Unit -> its marker. The nameless one: single files of the run."""
SINGLE = ("run.yaml", "events.jsonl", "state.json")
AT_THE_END = ("state.json",)
"""Of a machine that works it tells nothing elsewhere: copied when the run's process ends."""
GROWING = ("data/answers/journal.jsonl", "events.jsonl")
"""Appended to: copied in their whole lines, and not at each change."""
TAIL_BYTES = 1 << 20  # no line of theirs is longer

Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Snapshot:
    """A unit at one moment: its marker's text; path in the run's folder -> (inode, mtime, size)."""

    marker: str | None
    files: dict[str, Signature]


def snapshot(root: Path, unit: str, *, last: bool) -> Snapshot | None:
    """None while the unit is being made anew."""
    if not unit:
        return Snapshot(None, _single(root, last))
    before = _text(root, MARKERS[unit])
    files = dict(_below(root, root / unit))
    if _text(root, MARKERS[unit]) != before:
        return None
    files.pop(str(MARKERS[unit]), None)
    return Snapshot(before, files)


def _single(root: Path, last: bool) -> dict[str, Signature]:
    names = [name for name in SINGLE if last or name not in AT_THE_END]
    return {name: _signed(root, root / name) for name in names if (root / name).exists()}


def _below(root: Path, folder: Path) -> list[tuple[str, Signature]]:
    """Files below `folder`; hidden ones that end with .tmp are not finished. Nothing when it is being
    deleted.
    """
    out = []
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                continue
            if entry.is_dir():
                out += _below(root, path)
            else:
                out.append((str(path.relative_to(root)), _signed(root, path)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return out


def _signed(root: Path, path: Path) -> Signature:
    inode, modified, size = signature(path.stat())
    if str(path.relative_to(root)) in GROWING:
        with open(path, "rb") as file:
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            size = start + file.read(size - start).rfind(b"\n") + 1
    return inode, modified, size


def signature(stat: os.stat_result) -> Signature:
    """Tells a file from the one that replaces it."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _text(root: Path, name: str | None) -> str | None:
    try:
        return (root / str(name)).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
