"""`draftsmith run --detach`: a run that goes on without its terminal; `draftsmith stop`: its end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.core import FaultFound, UserError
from draftsmith.files import run_folder
from draftsmith.monitor import now
from draftsmith.monitor.processes import started

LOG = "supervisor.log"
START_S = 60.0
LOADING_S = 20.0  # most mistakes are refused before that
STOP_S = 180.0  # a supervisor gives its worker 90 s
GOOD = 0


def detach(root: Path, words: list[str]) -> int:
    """Start `draftsmith WORDS` in a session of its own, and return once a stage works, or has been loading for
    a while; what it says goes to RUN/logs. Its exit code, if it ends before that.
    """
    run_folder(root)
    run_folder(root / "logs", root)
    path = root / "logs" / LOG
    with open(path, "ab") as log:
        begin = path.stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "draftsmith.cli", *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    patience, loading = time.monotonic() + START_S, time.monotonic() + LOADING_S
    while time.monotonic() < patience:
        code = process.poll()
        said = now.read_supervisor(root)
        begun = said is not None and said["pid"] == process.pid
        if begun and (
            now.read(root)["state"] not in ("QUEUED", "LOADING") or time.monotonic() > loading
        ):
            print(f"started, process {process.pid}; draftsmith status|watch|stop {root}")
            return GOOD
        if code is not None:
            print(
                path.read_bytes()[begin:].decode(errors="replace"),
                end="",
                file=sys.stderr if code else sys.stdout,
            )
            return code
        time.sleep(0.1)
    raise FaultFound(f"process {process.pid} did not begin within {START_S:.0f} s ({path})")


def stop(root: Path) -> int:
    """End what works in a run's folder, and wait for it."""
    pid = _leader(root)
    if pid is None:
        print(f"nothing is at work there ({now.line(now.read(root))})")
        return GOOD
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGTERM)
    patience = time.monotonic() + STOP_S
    while _leader(root) == pid:
        if time.monotonic() > patience:
            raise FaultFound(f"process {pid} did not end within {STOP_S:.0f} s after SIGTERM")
        time.sleep(0.1)
    print(now.line(now.read(root)))
    return GOOD


def _leader(root: Path) -> int | None:
    """The process to tell: the supervisor, or that of a stage without one."""
    supervisor = now.read_supervisor(root)
    state = now.read(root)
    if supervisor is None and state["state"] in now.ENDED:
        return None
    said: dict[str, Any] = supervisor or state["workers"][0]
    if said["host"] != socket.gethostname():
        raise UserError(
            where=str(root),
            found=f"a run on another machine ({said['host']})",
            expected="one on this machine",
            remedy=f"Say `draftsmith stop {root}` there.",
        )
    if said["began"] is None or started(said["pid"]) != said["began"]:
        return None  # it is gone, and another process may have its number
    return said["pid"]
