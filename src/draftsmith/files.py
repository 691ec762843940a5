"""Atomic files and digests: what exists is whole, and what it was made from is written beside it."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.core import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ABANDONED_S = 24 * 3600.0
"""What a writer on another host put aside, and did not touch for so long, was left."""
FULL_WORDS = ("No space left on device", "File too large")  # libraries that lose the number


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary name in the same folder, sync, rename. A full disk is a
    UserError.
    """
    with disk_errors(path), synced_aside(path, write) as temporary:
        os.replace(temporary, path)


@contextlib.contextmanager
def synced_aside(path: Path, write: Callable[[Path], Any]) -> Iterator[Path]:
    """A file beside `path`, written and on the disk; gone when the block ends, unless renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = aside(path)
    try:
        write(temporary)
        _sync(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """JSON, written aside and renamed."""
    write_atomic(path, lambda temporary: temporary.write_text(json.dumps(data, indent=1) + "\n"))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under `path` only when the block ends well."""
    temporary = aside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with disk_errors(path):
            yield temporary
            publish_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, path: Path) -> None:
    """Sync a folder's files and give it its name."""
    for file in temporary.rglob("*"):
        if file.is_file():
            _sync(file)
    os.replace(temporary, path)


def aside(path: Path) -> Path:
    """A hidden name beside `path` that tells whose it is (remove_leftovers)."""
    return path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.tmp")


def _sync(path: Path) -> None:
    """To the disk, and readable as other files are: safetensors makes its own private."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def run_folder(path: Path, run: Path | None = None) -> None:
    """Make the folder of a run, or one in `run`. Raises UserError where none can be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            where=f"run: {run or path}",
            found=f"a path that cannot be a folder ({error.strerror})"
            if run is None
            else f"a folder in which {path.name} cannot be made ({error.strerror})",
            expected="a folder to write in",
            remedy="Choose another `run:`.",
        ) from None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn 'no space left', however the library words it, into one message with numbers."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in FULL
        if full or any(words in str(error) for words in FULL_WORDS):
            free = shutil.disk_usage(path.parent if path.parent.exists() else Path(".")).free
            raise UserError(
                where=str(path),
                found=f"a full disk ({free / 1e9:.3f} GB free)",
                expected="room for this file",
                remedy="Free space or point the run at a larger disk; finished files are kept, and the same "
                "command goes on from them.",
            ) from error
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed writer left aside in `folder` (names that begin with a dot and end with
    .tmp), not what another process writes now: two may write one store.
    """
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if _is_written(path):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_written(path: Path) -> bool:
    """Whether its writer lives: on this host its process tells, on another the file's age."""
    name = re.fullmatch(r".*\.(\d+)@(.+)\.tmp", path.name)
    if name is None:
        return False
    if name[2] != socket.gethostname():
        return time.time() - path.stat().st_mtime < ABANDONED_S
    return int(name[1]) != os.getpid() and process_lives(int(name[1]))


def process_lives(pid: int) -> bool:
    """Whether a process of this host has this id and has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(data: Any) -> str:
    """SHA-256 of plain data as canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
