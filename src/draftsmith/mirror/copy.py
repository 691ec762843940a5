"""Copying a run's folder to its mirror, unit by unit (scan.py).

At every moment the catalogue names only what is there and belongs together: what is overwritten is
taken back before, what is new is named after it has gone up, what is gone is deleted last.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import BinaryIO

from draftsmith.bucket import Bucket
from draftsmith.mirror import catalogue as catalogues
from draftsmith.mirror.catalogue import Catalogue, Entry, Held
from draftsmith.mirror.scan import GROWING, MARKERS, Signature, Snapshot, signature, snapshot

CHUNK_BYTES = 8 << 20
GROWN_S, GROWN_SHARE, GROWN_BYTES = 30.0, 0.1, 64 << 20
"""A growing file is copied again after so long, once it has grown by a tenth or by so much."""
COMMIT_S = 10.0
"""Files that have gone up are named at least so often."""


class Copier:
    """Brings a mirror up to a run's folder; one thread."""

    def __init__(self, root: Path, bucket: Bucket, held: Catalogue) -> None:
        self.root, self.bucket, self.held = root, bucket, held
        self._copied: dict[str, Signature] = {}
        self._at: dict[str, float] = {}
        self._committed = 0.0
        self._swept = False

    def copy(self, *, last: bool) -> None:
        """One look at every unit. Raises UserError when the store refuses, or is away for long."""
        for unit in MARKERS:
            now = snapshot(self.root, unit, last=last)
            if now is not None:
                self._unit(unit, now, last)
        if not self._swept:
            self._sweep()

    def behind(self) -> dict[str, int]:
        """Files that the mirror lacks, and their bytes."""
        units = [snapshot(self.root, unit, last=True) for unit in MARKERS]
        files = {path: sign for unit in units if unit for path, sign in unit.files.items()}
        return {path: sign[2] for path, sign in files.items() if self._copied.get(path) != sign}

    def _unit(self, unit: str, now: Snapshot, last: bool) -> None:
        was = self.held.units.get(unit, Held(None))
        gone = [path for path in was.files if path not in now.files and (unit or last)]
        if not (self._new(now, was, last) or gone or now.marker != was.marker):
            return
        catalogues.check_owner(self.bucket, self.held)
        if was.files and _inputs(now.marker) != _inputs(was.marker):
            was = Held(None)  # nothing of the old work may stand beside the new
            self._commit(unit, was)
        new, held, whole = self._new(now, was, last), Held(was.marker, dict(was.files)), True
        for group in _groups(unit, new):
            whole &= self._group(unit, {path: new[path] for path in group}, held)
        if whole:  # else the newest checkpoint was pruned before it could be read: keep the old one
            held.files = {path: entry for path, entry in held.files.items() if path not in gone}
        self._commit(unit, Held(now.marker, held.files))
        marker = MARKERS[unit]
        if marker and now.marker is not None:  # for readers; a restore takes the catalogue's
            self.bucket.replace(marker, now.marker.encode())
        if whole:
            self.bucket.delete(gone)

    def _new(self, now: Snapshot, was: Held, last: bool) -> dict[str, Signature]:
        return {
            path: sign
            for path, sign in now.files.items()
            if (path not in was.files or self._copied.get(path) != sign)
            and (last or self._due(path, sign))
        }

    def _due(self, path: str, sign: Signature) -> bool:
        if path not in GROWING or path not in self._copied:
            return True
        before = self._copied[path][2]
        grown = sign[2] - before >= min(GROWN_BYTES, GROWN_SHARE * before)
        return grown and time.monotonic() - self._at[path] >= GROWN_S

    def _group(self, unit: str, files: dict[str, Signature], held: Held) -> bool:
        """Bring files up that belong together and enter them in `held`. False, and none of them, when
        one is gone or replaced since it was seen.
        """
        with contextlib.ExitStack() as stack:
            try:  # all are opened first: what is pruned meanwhile can be read to its end
                opened = {path: stack.enter_context(open(self.root / path, "rb")) for path in files}
            except FileNotFoundError:
                return False
            if any(not _is(opened[path], sign) for path, sign in files.items()):
                return False
            done = {
                path: held.files[path]
                for path, sign in files.items()
                if path in held.files and _is_entry(opened[path], sign, held.files[path])
            }
            if any(path in held.files and path not in done for path in files):
                for path in files:
                    held.files.pop(path, None)
                self._commit(unit, held)
            for path, sign in files.items():
                if path not in done:
                    done[path] = self._upload(path, opened[path], sign)
        held.files.update(done)
        self._copied.update(files)
        if time.monotonic() - self._committed > COMMIT_S:
            self._commit(unit, held)
        return True

    def _upload(self, path: str, file: BinaryIO, sign: Signature) -> Entry:
        checksum = hashlib.sha256()

        def chunks() -> Iterator[bytes]:
            nonlocal checksum
            checksum = hashlib.sha256()  # anew when a broken put is repeated
            for chunk in _chunks(file, sign):
                checksum.update(chunk)
                yield chunk

        self._at[path] = time.monotonic()
        self.bucket.replace_large(path, chunks, sign[2])
        return Entry(sign[2], checksum.hexdigest())

    def _commit(self, unit: str, held: Held) -> None:
        catalogues.check_owner(self.bucket, self.held)
        self.held.units[unit] = Held(held.marker, dict(held.files))
        catalogues.write(self.bucket, self.held)
        self._committed = time.monotonic()

    def _sweep(self) -> None:
        """Delete what an earlier process left there and never named or forgot to delete."""
        named = {path for held in self.held.units.values() for path in held.files}
        named |= {marker for marker in MARKERS.values() if marker}
        ours = [name for name in self.bucket.names() if name.split("/")[0] in catalogues.FOLDERS]
        self.bucket.delete([name for name in ours if name not in named])
        self._swept = True


def _groups(unit: str, files: dict[str, Signature]) -> list[list[str]]:
    """A checkpoint's files belong together; others stand alone."""
    groups: dict[str, list[str]] = {}
    for path in files:
        folder = str(PurePath(path).parent)
        groups.setdefault(folder if unit and folder != unit else path, []).append(path)
    return list(groups.values())


def _is(file: BinaryIO, sign: Signature) -> bool:
    """Whether this is the file that was seen; it may have grown."""
    now = signature(os.fstat(file.fileno()))
    return now[0] == sign[0] and now[2] >= sign[2]


def _is_entry(file: BinaryIO, sign: Signature, entry: Entry) -> bool:
    """Whether the mirror has this file already, from an earlier process."""
    if entry.bytes != sign[2]:
        return False
    checksum = hashlib.sha256()
    for chunk in _chunks(file, sign):
        checksum.update(chunk)
    return checksum.hexdigest() == entry.sha256


def _chunks(file: BinaryIO, sign: Signature) -> Iterator[bytes]:
    file.seek(0)
    left = sign[2]
    while left:
        chunk = file.read(min(CHUNK_BYTES, left))
        assert chunk, "a file that was there to its end has no end"
        left -= len(chunk)
        yield chunk


def _inputs(marker: str | None) -> object:
    """What a unit was made from, as its marker says."""
    return None if marker is None else json.loads(marker).get("inputs")
