"""Faults in real supervised runs of the built-in target: begin a run, do it harm, see what `status` says and
after how long, and whether it ends with the bytes of an undisturbed one.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import contents, environment, resume, write_config

from draftsmith.core import UserError
from draftsmith.monitor import now

HOOKS = Path(__file__).parent / "hooks"
SUPERVISE = {"enabled": True, "backoff_s": 2.0, "stall_s": 4.0}
TRAIN = {"epochs": 2, "verdict_prompts": 1, "checkpoint_every": 5}
CHEAP = {"methods": ["ar", "chain"], "max_prompts": 1, "max_new_tokens": 8}
SECTIONS: dict[str, Any] = {
    "supervise": SUPERVISE, "train": TRAIN, "evaluate": CHEAP,
}  # fmt: skip


@dataclass
class Seen:
    """What `status` said first that answers the question, and seconds since the harm was done."""

    state: dict[str, Any]
    after_s: float

    @property
    def cause(self) -> str:
        failure = self.state["failure"]
        return f"{failure['category']}: {failure['cause']}" if failure else ""


class Run:
    """A run in `folder` that begins where the run in `before` has done its stages up to `last`."""

    def __init__(
        self, before: Path | None, folder: Path, last: str = "extract", **sections: Any
    ) -> None:
        self.folder, self.root = folder, folder / "run"
        folder.mkdir()
        merged = {**SECTIONS, **sections}
        self.config = (
            resume(before, folder, last, **merged) if before else write_config(folder, **merged)
        )
        self.happened = folder / "happened"
        self.process: subprocess.Popen | None = None

    def start(self, fault: str = "", *words: str, **options: Any) -> "Run":
        """`draftsmith run`; with a fault of hooks/sitecustomize.py."""
        env = environment()
        if fault:
            env["DRAFTSMITH_FAULT"] = f"{fault}:{self.happened}"
            env["PYTHONPATH"] = f"{HOOKS}:{env.get('PYTHONPATH', '')}"
        out = open(self.folder / "said", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftsmith.cli", "run", str(self.config), *words],
            **{"stdout": out, "stderr": out, "env": env, "start_new_session": True, **options},
        )
        return self

    def until(
        self,
        seen: Callable[[dict[str, Any]], bool],
        since: float | None = None,
        timeout: float = 60,
    ) -> Seen:
        """Look at the state until it is so; seconds since `since`, or since now."""
        begun = since or time.monotonic()
        end, ended = begun + timeout, False
        while time.monotonic() < end:
            if not ended and self.process is not None and self.process.poll() is not None:
                end, ended = min(end, time.monotonic() + 10), True  # little more can happen
            try:
                state = now.read(self.root)
            except UserError:
                state = None
            if state and seen(state):
                return Seen(state, time.monotonic() - begun)
            time.sleep(0.05)
        raise AssertionError(f"never seen; now: {now.line(now.read(self.root))}\n{self.said()}")

    def training(self, step: int = 6) -> dict[str, Any]:
        """Wait until it trains."""
        return self.until(lambda s: s["state"] == "TRAINING" and s["done"] >= step).state

    def harmed(self) -> float:
        """When the planted fault happened."""
        deadline = time.monotonic() + 60
        while not self.happened.exists():
            assert time.monotonic() < deadline, f"no fault happened\n{self.said()}"
            time.sleep(0.02)
        return time.monotonic()

    def end(self, timeout: float = 150) -> int:
        """Wait for `draftsmith run`; its exit code."""
        assert self.process is not None, "started"
        return self.process.wait(timeout)

    def again(self) -> int:
        """The same command, once more."""
        return self.start().end()

    def kill(self, pid: int) -> float:
        """kill -9; when."""
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    def same_as(self, other: Path) -> bool:
        """Whether training ended with the same bytes. A checkpoint that was the best on the way is kept
        where it was made: only the last is compared.
        """
        last = max(
            (path.name for path in (other / "checkpoints").glob("step-*")), key=lambda n: int(n[5:])
        )
        return contents(self.root / "checkpoints" / last) == contents(other / "checkpoints" / last)


def left_over(folder: Path) -> list[str]:
    """Processes that name this folder on their command line, and do not end within seconds."""
    deadline = time.monotonic() + 5
    while (found := _naming(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _naming(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and int(path.parent.name) != os.getpid():
            found.append(words)
    return found
