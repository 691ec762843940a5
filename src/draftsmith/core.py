"""The shared nouns: what a conversation, a sample, a row plan and an error are. Imports nothing of
draftsmith.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "held_out"]


class UserError(Exception):
    """A mistake the user can mend. The command prints the message alone and exits 2."""

    def __init__(self, *, where: str, found: str, expected: str, remedy: str) -> None:
        super().__init__(f"{where}: found {found}; expected {expected}. {remedy}")
        self.parts = {"where": where, "found": found, "expected": expected, "remedy": remedy}

    def __reduce__(self) -> Any:  # a worker's error reaches the command through a pickle
        return _user_error, (self.parts,)


def _user_error(parts: dict[str, str]) -> UserError:
    return UserError(**parts)


class Damaged(UserError):
    """A file that is not what was written: gone, cut short, or changed."""

    @classmethod
    def file(cls, where: str, found: str) -> "Damaged":
        """A file that a stage wrote and can write again."""
        return cls(
            where=where,
            found=f"a damaged or missing file ({found})",
            expected="the file as it was written",
            remedy="Delete it and run the stage that wrote it again.",
        )


class FaultFound(Exception):
    """The work was done and showed a fault (for example a text that must be identical and is not).
    Exit 1.
    """


class Stopped(Exception):
    """SIGTERM or Ctrl-C, turned into normal unwinding. Exit 4."""


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation: `input_ids` and `loss_mask` of equal length; 1 marks what the
    target generates.
    """

    sample_id: int
    input_ids: list[int]
    loss_mask: list[int]
    source: str = ""
    split: Split = "train"


@dataclass(frozen=True)
class RowPlan:
    """Which samples share a batch: `rows[r]` lists positions into the planned lengths, longest
    first.
    """

    rows: list[list[int]]
    num_tokens: int
    padded_tokens: int


@dataclass
class StageResult:
    """What a stage leaves: its folder, whether it was already complete, and numbers worth a line."""

    stage: str
    path: str
    skipped: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
