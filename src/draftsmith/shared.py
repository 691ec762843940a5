"""Whether several machines see the same folder: a file that one makes there, the others find."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

SEEN_S = 30.0
"""A network file system may show a new file late."""


@contextmanager
def marked(folders: Sequence[str]) -> Iterator[list[str]]:
    """For the time of the block, a file in each of these folders that is local; their paths."""
    marks = [
        Path(folder).expanduser().absolute() / f".seen-{uuid4().hex}"
        for folder in folders
        if "://" not in folder
    ]
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        yield list(map(str, marks))
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def unseen(marks: Sequence[str]) -> list[str]:
    """Folders of those marks that do not appear on this machine, waited for together."""
    deadline = time.monotonic() + SEEN_S
    left = [Path(mark) for mark in marks]
    while left:
        left = [mark for mark in left if not _is_listed(mark)]
        if left and time.monotonic() > deadline:
            return [str(mark.parent) for mark in left]
        if left:
            time.sleep(0.5)
    return []


def _is_listed(mark: Path) -> bool:
    with suppress(OSError):
        return mark.name in os.listdir(mark.parent)  # a listing is asked of the server anew
    return False
