"""What servers have answered so far: one JSON line an answer, appended as it comes, so that a killed
run asks nothing twice. It becomes Parquet when all is answered. A torn last line is an answer that
was not kept; it is asked for again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "journal.jsonl"


class Journal:
    """Answers and failures by (sample_id, turn). In memory are only their places in the file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._places: dict[tuple[int, int], int] = {}
        self.failures: dict[tuple[int, int], str] = {}
        end = self._read() if self.path.exists() else 0
        self._file = open(self.path, "ab")  # noqa: SIM115  # closed by close()
        self._file.truncate(end)
        self._file.seek(end)

    def _read(self) -> int:
        """Take up what is there; where its last whole line ends."""
        end = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = json.loads(line)
                key = (record["sample_id"], record["turn"])
                if "failed" not in record:
                    self._places[key] = end
                end += len(line)
        return end

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, record: dict[str, Any]) -> None:
        """Keep an answer. A process that is killed after this has kept it."""
        key = (record["sample_id"], record["turn"])
        self._places[key] = self._file.tell()
        self._write(record)

    def fail(self, sample_id: int, turn: int, reason: str) -> None:
        """Note a request that was given up; another run asks it again."""
        self.failures[sample_id, turn] = reason
        self._write({"sample_id": sample_id, "turn": turn, "failed": reason})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def get(self, key: tuple[int, int]) -> dict[str, Any]:
        """A kept answer."""
        with open(self.path, "rb") as file:
            file.seek(self._places[key])
            return json.loads(file.readline())

    def answers(self) -> Iterator[dict[str, Any]]:
        """All answers by sample and turn, whenever they came."""
        with open(self.path, "rb") as file:
            for key in sorted(self._places):
                file.seek(self._places[key])
                yield json.loads(file.readline())

    def close(self) -> None:
        """Make it durable."""
        os.fsync(self._file.fileno())
        self._file.close()
