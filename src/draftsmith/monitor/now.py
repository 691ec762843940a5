"""Where a run stands now, as everyone but its own processes reads it: state.json, the locks, and what its
supervisor left. A run whose process died shows as FAILED, one that does not advance as STALLED.
"""

import contextlib
import fcntl
import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from draftsmith.core import UserError
from draftsmith.monitor.processes import started
from draftsmith.monitor.said import RunState, Supervisor, checked

DEAD_AFTER_S = 60.0  # without a heartbeat, seen from another host
FULL_BYTES = 64 << 10  # less than one more state.json and a log's lines need
LOADING_TIMES = 3
"""So much longer may a run show no progress while it loads a large target, or its ranks start."""
WORKING = {
    "prepare": "PREPARING",
    "regenerate": "REGENERATING",
    "tokenize": "TOKENIZING",
    "extract": "EXTRACTING",
    "train": "TRAINING",
    "evaluate": "EVALUATING",
    "export": "EXPORTING",
}
STAGES = tuple(WORKING)
ENDED = ("DONE", "FAILED", "STOPPED")
SUPERVISOR, SUPERVISOR_LOCK = "supervisor.json", ".supervisor"


def read(root: Path) -> dict[str, Any]:
    """The run's state as it is now. Raises UserError where no run is."""
    supervisor = read_supervisor(root)
    state = _stored(root) if (root / "state.json").exists() or not supervisor else None
    if supervisor and (state is None or state.get("try") != supervisor["try"]):
        return _queued(root, state, supervisor)  # it has not come to its first stage
    assert state is not None, "without a supervisor there is a state"
    if supervisor:
        state["supervisor"] = supervisor
    if state["state"] in ("FAILED", "STOPPED") and supervisor:
        return _queued(root, state, supervisor, state["failure"])
    if state["state"] in ENDED:
        return state
    worker = state["workers"][0]
    if not _works(root, state, worker):
        if supervisor:
            return _queued(root, state, supervisor)
        state["state"] = "FAILED"
        said = f"process {worker['pid']} died without a word"
        state["failure"] = full_disk(root) or died(said)
    elif not advances(state):
        state["state"] = "STALLED"
        if supervisor and supervisor["stalled"]:
            state["failure"] = supervisor["stalled"]
    return state


def died(said: str) -> dict[str, Any]:
    """The failure of a process that could not say why."""
    return {
        "cause": f"{said} (killed, or out of memory)",
        "trace": "",
        "ours": False,
        "category": "host memory or killed",
        "remedy": "`dmesg` tells whether the system killed it for want of memory: then use fewer workers or "
        "a larger machine. The same command goes on.",
    }


def full_disk(root: Path) -> dict[str, Any] | None:
    """The failure that the run's disk is full: what happened then could not be written down. None if it is not."""
    free = shutil.disk_usage(root).free
    if free > FULL_BYTES:
        return None
    return {
        "cause": f"a full disk: {free:,} bytes are free at {root}",
        "trace": "",
        "ours": True,
        "category": "disk full",
        "remedy": "Free space, or point run and features.store at a larger disk; the same command goes on.",
    }


def read_supervisor(root: Path) -> dict[str, Any] | None:
    """What the run's living supervisor says of itself; None without one."""
    try:
        said = checked(Supervisor, json.loads((root / SUPERVISOR).read_text(errors="replace")))
    except (OSError, ValueError, RecursionError):
        return None
    here = said["host"] == socket.gethostname()
    if here and not held(root / SUPERVISOR_LOCK):
        return None
    if not here and time.time() - said["heartbeat_at"] > DEAD_AFTER_S:
        return None
    return said


def advances(state: dict[str, Any]) -> bool:
    """Whether something was done lately. On this host the clock that no one sets tells."""
    limit = state["stall_s"] * (LOADING_TIMES if state["state"] in ("LOADING", "QUEUED") else 1)
    if state["workers"][0]["host"] == socket.gethostname():
        return time.monotonic() - state["progress_s"] <= limit
    return time.time() - state["progress_at"] <= limit


def _queued(
    root: Path,
    state: dict[str, Any] | None,
    supervisor: dict[str, Any],
    failure: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Between two tries, or before the first stage of one."""
    blank = {"run": str(root), "stage": "run", "done": 0, "total": None, "unit": "", "rate": None,
             "eta_s": None, "gpus": [], "last": {}, "started_at": supervisor["started_at"],
             "heartbeat_at": supervisor["heartbeat_at"]}  # fmt: skip
    host = supervisor["host"]
    return {
        **(state or blank),
        "state": "QUEUED",
        "rate": None,
        "eta_s": None,
        "workers": [{"pid": supervisor["pid"], "host": host, "role": "supervisor"}],
        "failure": failure or supervisor["failure"],
        "supervisor": supervisor,
    }


def _stored(root: Path) -> dict[str, Any]:
    path = root / "state.json"
    if not path.exists():
        raise UserError(
            where=str(root),
            found="no state.json",
            expected="a run's folder",
            remedy="Give the folder named by `run:` in the configuration.",
        )
    try:
        return checked(RunState, json.loads(path.read_text(errors="replace")))
    except (ValueError, RecursionError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            where=str(path),
            found=f"no state ({type(error).__name__}: {said})",
            expected="what a stage writes",
            remedy="Run a stage again: it writes the file anew.",
        ) from None


def _works(root: Path, state: dict[str, Any], worker: dict[str, Any]) -> bool:
    """Whether the run's process lives: it holds the folder's lock while a stage works. On another
    host only its heartbeat can tell.
    """
    if worker["host"] != socket.gethostname():
        return time.time() - state["heartbeat_at"] < DEAD_AFTER_S
    if state["state"] == "QUEUED":  # between two stages nobody holds the lock
        return worker["began"] is not None and started(worker["pid"]) == worker["began"]
    return held(root / ".lock")


def held(path: Path) -> bool:
    """Whether a process holds this lock."""
    with contextlib.suppress(OSError), open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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
        parts.append(f"ETA {clock(state['eta_s'])}")
    parts += [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in state["last"].items()
    ]
    parts += [
        f"gpu{gpu['index']} {gpu['used_bytes'] / 2**30:.1f}/{gpu['total_bytes'] / 2**30:.0f} GiB"
        + (f" {100 * gpu['use']:.0f}%" if gpu["use"] is not None else "")
        for gpu in state["gpus"]
    ]
    supervisor = state.get("supervisor")
    if supervisor and supervisor["restarts"]:
        parts.append(f"restart {supervisor['restarts']}" + _waits(supervisor))
    if state["failure"]:
        said = state["failure"]
        parts.append(f"{said['category']}: {said['cause']} {said['remedy']}".strip())
    return " | ".join(parts)


def _waits(supervisor: dict[str, Any]) -> str:
    left = (supervisor["waits_until"] or 0) - time.time()
    return f" in {left:.0f} s" if left > 0 else ""


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
