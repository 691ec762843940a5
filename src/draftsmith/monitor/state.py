"""state.json (where the run stands now) and events.jsonl (what happened). Written by stages, read
by everyone else.

Reading: `draftsmith status RUN`, or any program; state.json is replaced atomically and is always
whole.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from draftsmith.core import Stopped, UserError
from draftsmith.files import disk_errors, process_lives, remove_leftovers, write_json
from draftsmith.monitor.failures import classify, errors

WORKING = {
    "prepare": "PREPARING",
    "regenerate": "REGENERATING",
    "tokenize": "TOKENIZING",
    "extract": "EXTRACTING",
    "train": "TRAINING",
    "evaluate": "EVALUATING",
    "export": "EXPORTING",
}
HEARTBEAT_S = 2.0
DEAD_AFTER_S = 60.0  # without a heartbeat, seen from another host
more_stages: ContextVar[bool] = ContextVar("more_stages", default=False)
"""Set by the pipeline: a finished stage is then followed by another and the run is QUEUED, not
DONE.
"""


class StageReport:
    """A stage's voice: progress into state.json (at most every 0.5 s), events into events.jsonl, a
    line to the terminal.
    """

    def __init__(self, root: Path, stage: str) -> None:
        now = time.time()
        self.root, self.stage = root, stage
        self._lock = threading.Lock()
        self._printed = self._written = 0.0
        self._first: tuple[float, int] | None = None
        self.state: dict[str, Any] = {
            "run": str(root),
            "stage": stage,
            "state": "LOADING",
            "done": 0,
            "total": None,
            "unit": "",
            "rate": None,
            "eta_s": None,
            "started_at": now,
            "heartbeat_at": now,
            "progress_at": now,
            "workers": [{"pid": os.getpid(), "host": socket.gethostname(), "role": "main"}],
            "gpus": [],
            "last": {},
            "failure": None,
        }

    def working(self, total: int | None, unit: str, done: int = 0) -> None:
        """Loading is over; `done` of `total` `unit` were found finished."""
        self._first = (time.time(), done)
        self.state.update(
            state=WORKING[self.stage], total=total, unit=unit, done=done, progress_at=time.time()
        )
        self.event("working", total=total, unit=unit, done=done)
        self._write()

    def progress(self, done: int, **last: Any) -> None:
        """`done` units are finished in all; `last` are numbers worth seeing (loss, tau ...)."""
        assert self._first is not None, "progress() comes after working()"
        now = time.time()
        begun, before = self._first
        rate = (done - before) / max(now - begun, 1e-9)
        total = self.state["total"]
        eta = (total - done) / rate if total is not None and rate > 0 else None
        with self._lock:
            self.state.update(done=done, rate=rate, eta_s=eta, progress_at=now)
            self.state["last"].update(last)
        if now - self._written > 0.5:
            self._write()
        if now - self._printed > 10 or done == total:
            self._printed = now
            print(line(self.state), flush=True)

    def tick(self) -> None:
        """Work goes on inside a unit that takes long, such as a batch of answers."""
        self.state["progress_at"] = time.time()

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        event(self.root, self.stage, kind, **fields)

    def end(self, state: str, failure: dict[str, Any] | None = None) -> None:
        """DONE, FAILED or STOPPED."""
        self.state.update(state=state, failure=failure)
        self.event(state.lower(), **(failure or {}))
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._written = time.time()
            self.state.update(heartbeat_at=self._written, gpus=_gpus())
            write_json(self.root / "state.json", self.state)

    def beat(self, stop: threading.Event) -> None:
        """Keep heartbeat_at fresh while the process lives; progress_at tells whether it advances."""
        while not stop.wait(HEARTBEAT_S):
            with contextlib.suppress(UserError, OSError):  # a full disk is the stage's to report
                self._write()


class NoReport:
    """The voice of a process that does not lead: silent."""

    def working(self, total: int | None, unit: str, done: int = 0) -> None: ...

    def progress(self, done: int, **last: Any) -> None: ...

    def tick(self) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...


Report = StageReport | NoReport


def event(root: Path, stage: str, kind: str, **fields: Any) -> None:
    """One line of events.jsonl."""
    record = {"at": round(time.time(), 3), "stage": stage, "kind": kind, **fields}
    path = root / "events.jsonl"
    with disk_errors(path), open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def _failure(cause: str, trace: str) -> dict[str, Any]:
    """A cause with its kind and, where it does not say so itself, what to do."""
    found = classify(first) if (first := next(iter(errors(trace)), None)) else classify(cause)
    remedy = "" if cause.startswith("UserError") else found.remedy
    return {"cause": cause, "trace": trace, "category": found.kind, "remedy": remedy}


def fail(root: Path, cause: str) -> None:
    """A run whose stages are done has failed all the same."""
    path = root / "state.json"
    if path.exists():
        failure = _failure(cause, "")
        write_json(path, {**json.loads(path.read_text()), "state": "FAILED", "failure": failure})
    event(root, "run", "failed", cause=cause, trace="")


@contextlib.contextmanager
def stage_report(root: Path, stage: str) -> Iterator[StageReport]:
    """Run a stage's body under a lock on the folder and record how it ended."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            where=f"run: {root}",
            found=f"a path that cannot be a folder ({error.strerror})",
            expected="a folder to write in",
            remedy="Choose another `run:`.",
        ) from None
    with locked(root):
        remove_leftovers(root)
        report = StageReport(root, stage)
        stop = threading.Event()
        heart = threading.Thread(target=report.beat, args=(stop,), daemon=True)
        end: tuple[str, dict[str, Any] | None] = ("QUEUED" if more_stages.get() else "DONE", None)
        try:
            report.event("start")
            report._write()
            heart.start()
            yield report
        except (Stopped, KeyboardInterrupt):
            end = ("STOPPED", None)
            raise Stopped(f"{stage}; the same command goes on from what is finished") from None
        except BaseException as error:
            trace = "" if isinstance(error, UserError) else traceback.format_exc()
            end = ("FAILED", _failure(f"{type(error).__name__}: {error}", trace))
            raise
        finally:
            stop.set()
            if heart.ident is not None:
                heart.join()
            # With the disk full this fails too; then the first error is the one to show.
            failed = end[0] == "FAILED"
            with contextlib.suppress(UserError) if failed else contextlib.nullcontext():
                report.end(*end)


def read(root: Path) -> dict[str, Any]:
    """The run's state as it is now: a dead worker shows as FAILED, one that does not advance as
    STALLED.
    """
    path = root / "state.json"
    if not path.exists():
        raise UserError(
            where=str(root),
            found="no state.json",
            expected="a run's folder",
            remedy="Give the folder named by `run:` in the configuration.",
        )
    try:
        state = json.loads(path.read_text())
        ended = state["state"] in ("DONE", "FAILED", "STOPPED")
        worker = state["workers"][0]
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(
            where=str(path),
            found=f"no state ({type(error).__name__}: {error})",
            expected="what a stage writes",
            remedy="Run a stage again: it writes the file anew.",
        ) from None
    if ended:
        return state
    if not _works(root, state, worker):
        state["state"] = "FAILED"
        died = f"process {worker['pid']} died without a word (killed, or out of memory)"
        state["failure"] = _failure(died, "")
    elif time.time() - state["progress_at"] > stall_after_s(loading=state["state"] == "LOADING"):
        state["state"] = "STALLED"
    return state


def _works(root: Path, state: dict[str, Any], worker: dict[str, Any]) -> bool:
    """Whether the run's process lives: it holds the folder's lock while a stage works. On another
    host only its heartbeat can tell.
    """
    if worker["host"] != socket.gethostname():
        return time.time() - state["heartbeat_at"] < DEAD_AFTER_S
    if state["state"] == "QUEUED":  # between two stages nobody holds the lock
        return process_lives(worker["pid"])
    with contextlib.suppress(OSError), open(root / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stall_after_s(*, loading: bool = False) -> float:
    """Seconds without progress after which a live run counts as stalled; loading a large target
    from a slow disk shows none, and is given three times as long.
    """
    return float(os.environ.get("DRAFTSMITH_STALL_S", "600")) * (3 if loading else 1)


def line(state: dict[str, Any]) -> str:
    """One line for people and SSH loops."""
    parts = [f"{state['state']:<12} {state['stage']}"]
    if state["total"]:
        parts.append(
            f"{state['done']:,}/{state['total']:,} {state['unit']} {100 * state['done'] / state['total']:.0f}%"
        )
    if state["rate"]:
        parts.append(f"{state['rate']:,.1f}/s")
    if state["eta_s"] is not None and state["state"] not in ("DONE", "FAILED", "STOPPED"):
        parts.append(f"ETA {_clock(state['eta_s'])}")
    parts += [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in state["last"].items()
    ]
    parts += [
        f"gpu{gpu['index']} {gpu['used_bytes'] / 2**30:.1f}/{gpu['total_bytes'] / 2**30:.0f} GiB"
        for gpu in state["gpus"]
    ]
    if state["failure"]:
        said = state["failure"]
        parts.append(f"{said['category']}: {said['cause']} {said['remedy']}".strip())
    return " | ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _gpus() -> list[dict[str, Any]]:
    import torch  # a worker has it loaded; readers of state.json never come here

    if not torch.cuda.is_initialized():
        return []
    out = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        out.append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "used_bytes": total - free,
                "total_bytes": total,
            }
        )
    return out


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One process at a time in a run's folder. Raises UserError when another is there."""
    with open(root / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                where=str(root),
                found="another draftsmith process at work in this folder",
                expected="one at a time",
                remedy="Wait for it, or use another `run:`.",
            ) from None
        yield
