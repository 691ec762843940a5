"""Where an output is kept: a local folder, or a prefix of an S3 bucket (bucket.py). Both hand out
whole files only, by name, and read byte ranges of them.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftsmith.bucket import Bucket
from draftsmith.core import Damaged, UserError
from draftsmith.files import disk_errors, remove_leftovers, synced_aside, write_atomic

S3 = "s3://"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Folder:
    """Files of a local folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def where(self, name: str) -> str:
        """The file's path, for messages."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """What lies there; hidden files are writers' own."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(
                where=str(self.path), found="a file", expected="a folder", remedy="Move it away."
            )
        found = self.path.iterdir() if self.path.exists() else ()
        return sorted(p.name for p in found if not p.name.startswith("."))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those of the named files that exist."""
        paths = {name: self.path / name for name in names}
        return {name: path.stat().st_size for name, path in paths.items() if path.exists()}

    def read(self, name: str) -> bytes | None:
        """A whole file, or None when there is none."""
        path = self.path / name
        return path.read_bytes() if path.exists() else None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the file's bytes from `start`. Raises Damaged when they are not there."""
        try:
            with open(self.path / name, "rb", buffering=0) as file:
                done = 0
                while done < len(out):
                    count = os.preadv(file.fileno(), [out[done:]], start + done)
                    if count == 0:
                        raise Damaged.file(self.where(name), f"no byte {start + done}")
                    done += count
        except OSError as error:
            raise Damaged.file(self.where(name), str(error)) from None

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """The bytes start:end of each range."""
        out = [bytearray(end - start) for start, end in ranges]
        for (start, _), piece in zip(ranges, out, strict=True):
            self.read_into(name, start, memoryview(piece))
        return out

    def put_new(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write a file unless another writer was first; it appears whole."""
        path = self.path / name

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                for part in parts:
                    file.write(part)

        with disk_errors(path), synced_aside(path, write) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                os.replace(temporary, path)  # a file system without links has one writer at a time

    def replace(self, name: str, data: bytes) -> None:
        """Write a file, or what it holds anew."""
        write_atomic(self.path / name, lambda temporary: temporary.write_bytes(data))

    def clear(self) -> None:
        """Delete everything there."""
        shutil.rmtree(self.path)

    def remove_leftovers(self) -> None:
        """Delete what a killed writer left aside."""
        remove_leftovers(self.path)

    def free_bytes(self) -> int | None:
        """Room for more, there or where it would be made; None when that is not known."""
        there = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        return shutil.disk_usage(there).free


Place = Folder | Bucket


def at(location: "str | Path | Place") -> Place:
    """The place that a path or an s3:// address names."""
    if isinstance(location, Folder | Bucket):
        return location
    if str(location).startswith(S3):
        return Bucket(str(location))
    return Folder(Path(location).expanduser())
