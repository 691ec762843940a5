"""Filling an empty run's folder from its mirror; and RUN/mirror.json, by which folder and mirror know
each other.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.bucket import LARGE_BYTES, Bucket
from draftsmith.core import Damaged
from draftsmith.files import file_digest, write_atomic, write_json
from draftsmith.mirror import catalogue as catalogues
from draftsmith.mirror.catalogue import Catalogue, Entry
from draftsmith.mirror.scan import AT_THE_END, MARKERS
from draftsmith.monitor.state import locked

NAME = "mirror.json"
AT_ONCE = 4


@dataclass(frozen=True)
class Marker:
    """RUN/mirror.json: the mirror of this folder, the catalogue's owner, and whether all is here."""

    mirror: str
    owner: str
    restored: bool


def read_marker(root: Path) -> Marker | None:
    """None for a folder without a mirror."""
    path = root / NAME
    if not path.exists():
        return None
    try:
        return Marker(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise Damaged.file(str(path), f"{type(error).__name__}: {error}") from None


def write_marker(root: Path, marker: Marker) -> None:
    """Replace it."""
    write_json(root / NAME, asdict(marker))


def is_fresh(root: Path) -> bool:
    """Whether no stage has left anything in the run's folder."""
    return not any((root / name).exists() for name in catalogues.FOLDERS)


def restore(root: Path, bucket: Bucket, held: Catalogue, marker: Marker) -> Catalogue:
    """Fetch every file that the mirror names, files before the markers that speak of them, and take
    the mirror over; its new catalogue. Killed, it goes on with what is missing. Raises Damaged for an
    object that is not what the catalogue says.
    """
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        write_marker(root, marker)
        files = {
            path: entry
            for unit in held.units.values()
            for path, entry in unit.files.items()
            if path not in AT_THE_END
        }
        size = sum(entry.bytes for entry in files.values())
        print(f"mirror     {len(files)} files, {size / 1e6:.1f} MB from {bucket}", flush=True)
        with ThreadPoolExecutor(AT_ONCE, "restore") as pool:
            jobs = [pool.submit(_fetch, root, bucket, path, entry) for path, entry in files.items()]
            for job in jobs:
                job.result()
        for unit, kept in held.units.items():
            text = kept.marker
            if text is not None:
                path = root / str(MARKERS[unit])
                write_atomic(path, lambda temporary, text=text: temporary.write_text(text))
        mine = Catalogue(marker.owner, held.units)
        catalogues.write(bucket, mine)
        write_marker(root, Marker(marker.mirror, marker.owner, restored=True))
    return mine


def _fetch(root: Path, bucket: Bucket, name: str, entry: Entry) -> None:
    path = root / name
    if path.exists() and path.stat().st_size == entry.bytes and file_digest(path) == entry.sha256:
        return
    checksum = hashlib.sha256()

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            for start in range(0, entry.bytes, LARGE_BYTES):
                piece = bytearray(min(LARGE_BYTES, entry.bytes - start))
                bucket.read_into(name, start, memoryview(piece))
                checksum.update(piece)
                file.write(piece)
        if checksum.hexdigest() != entry.sha256:
            raise Damaged(
                where=bucket.where(name),
                found="another file than the mirror names",
                expected="the file as it was copied",
                remedy="Restore that version of the object, or start the run anew elsewhere.",
            )

    write_atomic(path, write)
