"""The processes of a run on this machine: which there are, what each does, where it stands, their end.

Reads Linux's /proc; elsewhere no process but the own children's ids is known.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUBREAPER = 36  # prctl(2): PR_SET_CHILD_SUBREAPER
STACKS = "stacks"
END_S = 10.0
ROLES = (
    (r"torch\.distributed\.run|torchrun", "torchrun"),
    (r"multiprocessing\.forkserver|multiprocessing\.resource_tracker", "helper"),
    (r"multiprocessing\.spawn|--multiprocessing-fork", "worker"),
    (r"draftsmith\.tether", "tether"),
    (r"api_server|launch_server|\bserve\b", "server"),
    (r"draftsmith\.cli train", "rank"),
)


def adopt_orphans() -> None:
    """From now on a process whose parent dies becomes a child of this one, if it descends from it: so
    none is lost. Linux only.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The ids of all processes below this one, parents first."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields and fields[0] != "Z":
            below.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = below.get(waiting.pop(0), [])
        found += children
        waiting += children
    return found


def described(pid: int) -> dict[str, Any]:
    """What a process is: pid, role, and whether a signal has stopped it."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    words = ""
    with contextlib.suppress(OSError):
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    role = next((role for pattern, role in ROLES if re.search(pattern, words)), "child")
    return {"pid": pid, "role": role, "stopped": bool(fields and fields[0] in "Tt")}


def started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks: with its id it names a process for good. None when it is gone."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return fields[19] if fields and fields[0] != "Z" else None


def _stat(path: Path) -> list[str]:
    """State, parent ... of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return path.read_text().rpartition(")")[2].split()
    return []


def end(pids: list[int], *, wait_s: float = END_S) -> None:
    """SIGTERM, and after `wait_s` SIGKILL to those that are left; returns when none is."""
    for sign, patience in ((signal.SIGTERM, wait_s), (signal.SIGKILL, END_S)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sign)
                os.kill(pid, signal.SIGCONT)  # one that is stopped hears it then
        deadline = time.monotonic() + patience
        while (pids := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether it runs. One that has ended and was our child is taken off the list of processes."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return bool(fields) and fields[0] != "Z"


def leave_stacks(root: Path) -> None:
    """From now on SIGUSR1 makes this process write the stacks of its threads below RUN/logs/stacks."""
    path = _stacks_of(root, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, open(path, "w"), all_threads=True)  # noqa: SIM115


def _stacks_of(root: Path, pid: int) -> Path:
    return root / "logs" / STACKS / f"{pid}.txt"


def stacks(root: Path, pid: int) -> str:
    """Where the threads of a process stand: by py-spy where it is installed and allowed to look, else by
    the process itself, if it can. Empty when neither can tell.
    """
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy:
        command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode == 0 and "Thread" in done.stdout:
                return done.stdout
    path = _stacks_of(root, pid)
    if not path.exists() or described(pid)["stopped"]:
        return ""  # without a handler the signal would end it
    before = path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
    return path.read_text()[before:]


def innermost(text: str) -> str:
    """Where the main thread stands, of what `stacks` gave: its innermost frame, and the first of ours above
    it: 'recv (socket.py:1), from next (draftsmith/features.py:88)'.
    """
    threads = re.split(r"^(?=Thread |Current thread )", text, flags=re.M)
    main = next((thread for thread in threads if "MainThread" in thread), threads[-1])
    frames = re.findall(r"^\s+(\w[\w.<>]*) \((\S+:\d+)\)", main, flags=re.M)
    frames += [
        (name, f"{'/'.join(file.split('/')[-2:])}:{line}")
        for file, line, name in re.findall(r'File "(.+?)", line (\d+) in (\S+)', main)
    ]
    ours = next((f"{name} ({at})" for name, at in frames if "draftsmith" in at), "")
    first = f"{frames[0][0]} ({frames[0][1]})" if frames else ""
    return first if first == ours or not ours else f"{first}, from {ours}"


def standing(root: Path, pid: int) -> tuple[str, str]:
    """Where a process and all below it stand: in a line, and every stack."""
    seen, text = [], ""
    for one in [pid, *descendants(pid)]:
        what = described(one)
        stack = stacks(root, one)
        role = "main" if one == pid else what["role"]
        text += f"== process {one} ({role}){' STOPPED' * what['stopped']}\n{stack}\n"
        if what["stopped"]:
            seen.append(f"process {one} ({role}) is stopped by a signal; kill -CONT {one} wakes it")
        elif role in ("main", "rank", "worker") and (frame := innermost(stack)):
            seen.append(f"process {one} ({role}) is in {frame}")
    return "; ".join(seen), text
