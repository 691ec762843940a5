"""state.json (where the run stands now) and events.jsonl (what happened), as stages write them. now.py
reads them; so may any program: state.json is replaced atomically and is always whole.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from draftsmith.core import Stopped, UserError
from draftsmith.files import disk_errors, remove_leftovers, run_folder, write_atomic, write_json
from draftsmith.monitor.failures import classify, errors
from draftsmith.monitor.gpus import gpus
from draftsmith.monitor.now import WORKING, line
from draftsmith.monitor.processes import descendants, described, started

WRITE_S, HEARTBEAT_S = 0.5, 2.0
PROCESSES_S = 10.0  # to look for them costs more than a heartbeat
LOCK_S = 2.0  # a reader holds the lock for an instant
LAUNCHED = "DRAFTSMITH_LAUNCHED"  # one of several ranks: why it failed is told by who launched them
TRY = "DRAFTSMITH_TRY"  # which try of which supervisor a process belongs to
OURS = {
    "UserError": "wrong use",
    "Damaged": "damaged file",
    "FaultFound": "fault found",
    "draftsmith": "wrong use",
}
more_stages: ContextVar[bool] = ContextVar("more_stages", default=False)
"""Set by the pipeline: a finished stage is then followed by another and the run is QUEUED, not
DONE.
"""


class StageReport:
    """A stage's voice: progress into state.json, by a thread of its own so that the work never waits for a
    disk; events into events.jsonl, a line to the terminal.
    """

    def __init__(self, root: Path, stage: str) -> None:
        now = time.time()
        self.root, self.stage = root, stage
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._printed = self._looked = 0.0
        self._changed = False
        self._first: tuple[float, int] | None = None
        self._loaded = time.monotonic()
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
            "progress_s": time.monotonic(),
            "stall_s": float(os.environ.get("DRAFTSMITH_STALL_S", "600")),
            "workers": [
                {
                    "pid": os.getpid(),
                    "began": started(os.getpid()),
                    "host": socket.gethostname(),
                    "role": "main",
                }
            ],
            "gpus": [],
            "disk_free_bytes": None,
            "last": {},
            "failure": None,
            "try": os.environ.get(TRY),
        }

    def loaded(self, what: str) -> None:
        """A part of loading is over: an event, with the seconds since the part before."""
        before, self._loaded = self._loaded, time.monotonic()
        self.event("loaded", what=what, seconds=round(self._loaded - before, 3))
        self.tick()

    def working(self, total: int | None, unit: str, done: int = 0) -> None:
        """Loading is over; `done` of `total` `unit` were found finished."""
        self._first = (time.monotonic(), done)
        self.tick()
        self.state.update(state=WORKING[self.stage], total=total, unit=unit, done=done)
        self.event("working", total=total, unit=unit, done=done)
        self._write()

    def progress(self, done: int, **last: Any) -> None:
        """`done` units are finished in all; `last` are numbers worth seeing (loss, tau ...)."""
        assert self._first is not None, "progress() comes after working()"
        now = time.monotonic()
        begun, before = self._first
        rate = (done - before) / max(now - begun, 1e-9)
        total = self.state["total"]
        eta = (total - done) / rate if total is not None and rate > 0 else None
        with self._lock:
            self.state.update(done=done, rate=rate, eta_s=eta)
            self.state["last"].update(last)
            self.tick()
        if now - self._printed > 10 or done == total:
            self._printed = now
            print(line(self.state), flush=True)

    def tick(self) -> None:
        """Work goes on inside a unit that takes long, such as a batch of answers."""
        self.state.update(progress_at=time.time(), progress_s=time.monotonic())
        self._changed = True

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        event(self.root, self.stage, kind, **fields)

    def end(self, state: str, failure: dict[str, Any] | None = None) -> None:
        """DONE, FAILED or STOPPED."""
        self.state.update(state=state, failure=failure)
        self.event(state.lower(), **(failure or {}))
        self._write()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                self._changed = False
                self.state["heartbeat_at"] = time.time()
                text = (
                    json.dumps(self.state) + "\n"
                )  # on lines of their own it takes ten times as long
            write_atomic(self.root / "state.json", lambda path: path.write_text(text))

    def beat(self, stop: threading.Event) -> None:
        """Write what has changed, and keep heartbeat_at fresh while the process lives; progress_at tells
        whether it advances.
        """
        seen = -HEARTBEAT_S
        while not stop.wait(WRITE_S):
            late = time.monotonic() - seen > HEARTBEAT_S
            with contextlib.suppress(UserError, OSError):  # a full disk is the stage's to report
                if late:
                    seen = time.monotonic()
                    self._look()
                if late or self._changed:
                    self._write()

    def _look(self) -> None:
        """At the machine: GPUs, disk, and now and then at the processes below this one."""
        seen: dict[str, Any] = {
            "gpus": gpus(),
            "disk_free_bytes": shutil.disk_usage(self.root).free,
        }
        if time.monotonic() - self._looked > PROCESSES_S:
            self._looked, host = time.monotonic(), socket.gethostname()
            below = [{**described(pid), "host": host} for pid in descendants(os.getpid())]
            seen["workers"] = [self.state["workers"][0], *below]
        with self._lock:
            self.state.update(seen)


class NoReport:
    """The voice of a process that does not lead: silent."""

    def loaded(self, what: str) -> None: ...

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


def failure_of(cause: str, trace: str) -> dict[str, Any]:
    """An error, 'Type: what it says', as a failure: of a chain the first one is the cause; its kind and, where it
    does not say so itself, what to do. `ours`: a message of this program's, which the same work would meet again.
    """
    kind, _, said = cause.partition(": ")
    first = next(iter(errors(trace)), cause)
    found = classify(first)
    if kind in OURS:
        category = OURS[kind] if found.kind == "unknown" else found.kind
        remedy = found.remedy if kind == "FaultFound" and found.kind != "unknown" else ""
        return {"cause": said, "trace": trace, "category": category, "remedy": remedy, "ours": True}
    if first.split(":")[0].rpartition(".")[2] != kind:
        cause = f"{first} (then {cause})"
    return {
        "cause": cause,
        "trace": trace,
        "category": found.kind,
        "remedy": found.remedy,
        "ours": False,
    }


def _free(found: list[dict[str, Any]]) -> str:
    """Free memory of GPUs, in words."""
    return ", ".join(
        f"gpu{gpu['index']} {(gpu['total_bytes'] - gpu['used_bytes']) / 2**30:.1f} of "
        f"{gpu['total_bytes'] / 2**30:.1f} GiB free"
        for gpu in found
    )


def fail(root: Path, failure: dict[str, Any]) -> None:
    """The run has failed, whatever its stages say: they are done, or what failed is not in their process."""
    path = root / "state.json"
    if path.exists():
        write_json(path, {**json.loads(path.read_text()), "state": "FAILED", "failure": failure})
    event(root, "run", "failed", **failure)


def stopped(root: Path) -> None:
    """The run was stopped, and its worker could not write that down: it had not begun, or was killed."""
    path = root / "state.json"
    if path.exists():
        state = json.loads(path.read_text())
        if state["state"] not in ("DONE", "STOPPED"):
            write_json(path, {**state, "state": "STOPPED", "failure": None})


@contextlib.contextmanager
def stage_report(root: Path, stage: str, sizes: str = "") -> Iterator[StageReport]:
    """Run a stage's body under a lock on the folder and record how it ended. `sizes` are the settings that
    decide how much GPU memory it takes, as they are now: for the remedy when that runs out.
    """
    run_folder(root)
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
            failure = failure_of(f"{type(error).__name__}: {error}", trace)
            if failure["category"] == "GPU memory":
                failure["remedy"] += f" Now: {', '.join(filter(None, [sizes, _free(gpus())]))}."
            end = ("QUEUED", None) if LAUNCHED in os.environ else ("FAILED", failure)
            raise
        finally:
            stop.set()
            if heart.ident is not None:
                heart.join()
            # With the disk full this fails too; then the first error is the one to show.
            failed = end[0] == "FAILED"
            with contextlib.suppress(UserError) if failed else contextlib.nullcontext():
                report.end(*end)


@contextlib.contextmanager
def locked(root: Path, name: str = ".lock") -> Iterator[None]:
    """One process at a time in a run's folder. Raises UserError when another is there."""
    with open(root / name, "w") as file:
        patience = time.monotonic() + LOCK_S
        while not _lock(file):
            if time.monotonic() > patience:
                raise UserError(
                    where=str(root),
                    found="another draftsmith process at work in this folder",
                    expected="one at a time",
                    remedy="Wait for it, end it with `draftsmith stop`, or use another `run:`.",
                )
            time.sleep(0.05)
        yield


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            where=file.name,
            found=f"a file system without locks ({error.strerror})",
            expected="one that has them, so that two processes never write one run",
            remedy="Mount it with locks (Lustre: -o flock), or use another `run:`.",
        ) from None
    return True
