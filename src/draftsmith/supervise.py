"""`draftsmith run`: this process looks after another one that does the work.

The worker runs all stages, in a session of its own, and writes to RUN/logs; this process shows what it
writes, starts it again when it crashes (what is on disk is not done again), and ends it with all its
processes. A closed terminal ends neither. If this process is killed, the worker stops as on SIGTERM, and
the same command goes on. docs/running.md.
"""

import codecs
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from draftsmith.config import RunConfig, SuperviseConfig
from draftsmith.core import Stopped, UserError
from draftsmith.files import run_folder, write_json
from draftsmith.monitor import now, processes
from draftsmith.monitor.failures import FINAL, TRANSIENT, first_cause
from draftsmith.monitor.state import TRY, event, fail, failure_of, locked, stopped

GOOD, FAILED, WRONG_USE, _, STOPPED = range(5)
LOGS = {"stdout": "run-main.log", "stderr": "run-main.err.log"}
LOOK_S = 0.2
BEAT_S = 2.0
STOP_S = 90.0  # a checkpoint may have to be finished
OLD_RUN_S = 120.0  # for what an earlier supervisor left to end
BACKOFF_MOST_S = 600.0


def is_worker() -> bool:
    """Whether a supervisor started this process to do the work."""
    return os.environ.get(TRY, "").partition(":")[0] == str(os.getppid())


def begin_worker(root: Path) -> None:
    """As a worker: end when the supervisor does, and be able to say where its threads stand."""
    processes.leave_stacks(root)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    os._exit(1)  # its main thread does not come back to Python


def run(cfg: RunConfig, words: list[str]) -> int:
    """Do the work of `draftsmith WORDS` in a worker, until it is done or cannot be done. The exit code."""
    run_folder(cfg.root)
    run_folder(cfg.root / "logs", cfg.root)
    with locked(cfg.root, now.SUPERVISOR_LOCK):
        supervisor = _Supervisor(cfg, words)
        supervisor.say()  # from now on it is this process that `stop` tells
        _wait_for_old(cfg.root)
        return supervisor.run()


def _wait_for_old(root: Path) -> None:
    """The worker of a killed supervisor ends by itself: let it."""
    patience, said = time.monotonic() + OLD_RUN_S, False
    while now.held(root / ".lock") and time.monotonic() < patience:
        if not said:
            print("waiting for the process of an earlier run to end", flush=True)
        said = True
        time.sleep(0.5)


class _Supervisor:
    """The state of one `draftsmith run`; `said` is supervisor.json."""

    def __init__(self, cfg: RunConfig, words: list[str]) -> None:
        self.root, self.words, self.rules = cfg.root, words, cfg.supervise
        self.child: subprocess.Popen | None = None
        self.handlers = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGINT)}
        self.said: dict[str, Any] = {
            "pid": os.getpid(), "began": processes.started(os.getpid()),
            "host": socket.gethostname(), "started_at": time.time(),
            "heartbeat_at": time.time(), "try": "", "restarts": 0, "retries": self.rules.retries,
            "waits_until": None, "failure": None, "stalled": None,
        }  # fmt: skip

    def run(self) -> int:
        """Until the work is done, cannot be done, or this process is told to stop."""
        processes.adopt_orphans()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._event("run", "supervised", pid=os.getpid(), command=self.words)
        try:
            return self._tries()
        except (Stopped, KeyboardInterrupt):
            stopped(self.root)
            raise

    def _tries(self) -> int:
        best, in_vain = (-1, -1), 0
        while True:
            oom_kills = _oom_kills()
            errors_from = _size(self.root / "logs" / LOGS["stderr"])
            code = self._try()
            if code == GOOD or (code == STOPPED and not self.said["stalled"]):
                return code
            failure = self._failure(code, errors_from, oom_kills)
            reached = self._reached()
            in_vain = 0 if reached > best else in_vain + 1
            best = max(best, reached)
            why_not = _why_not(failure, in_vain, self.rules)
            if why_not is not None:
                self._give_up(failure, why_not, code)
                return WRONG_USE if code == WRONG_USE else FAILED
            self._pause(failure, in_vain)

    def _try(self) -> int:
        """One worker's life; its exit code."""
        number = self.said["restarts"]
        self.said.update(waits_until=None, stalled=None)
        self.said["try"] = f"{os.getpid()}:{number}"
        self.say()
        env = {**os.environ, TRY: self.said["try"], "PYTHONUNBUFFERED": "1",
               "DRAFTSMITH_STALL_S": str(self.rules.stall_s)}  # fmt: skip
        if sys.stdout.isatty():
            env["COLUMNS"] = str(shutil.get_terminal_size().columns)  # for tables in the log
        command = [sys.executable, "-m", "draftsmith.cli", *self.words]
        logs = [self.root / "logs" / LOGS[name] for name in ("stdout", "stderr")]
        with open(logs[0], "ab") as out, open(logs[1], "ab") as err:
            echoes = [_Echo(logs[0], sys.stdout), _Echo(logs[1], sys.stderr)]
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=env,
            )
            try:
                self._look_after(self.child, echoes)
            finally:
                self._end_all(self.child)
                for echo in echoes:
                    echo.show()
        return self.child.returncode

    def _look_after(self, child: subprocess.Popen, echoes: list["_Echo"]) -> None:
        """Until it ends, or stands still for too long."""
        beat = time.monotonic()
        while child.poll() is None:
            time.sleep(LOOK_S)  # waiting for it with a limit would wake up four times as often
            for echo in echoes:
                echo.show()
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                if not (self.root / "logs").is_dir():
                    child.kill()  # told to stop, it would write its state once more
                    raise UserError(
                        where=str(self.root),
                        found="that the run's folder is gone",
                        expected="it to stay while the run lasts",
                        remedy="Run the same command again.",
                    )
                self.say()
                if self._stands_still():
                    return

    def _stands_still(self) -> bool:
        """Whether the worker is to be ended. At first it is only looked at: where does it stand?"""
        try:
            state = now.read(self.root)
        except UserError:
            return False
        if state["state"] != "STALLED":
            self.said["stalled"] = None
            return False
        stalled = self.said["stalled"]
        if stalled is None:
            self.said["stalled"] = self._stall(state)
            self.say()
            return False
        waited = time.monotonic() - stalled["since_s"]
        return self.rules.restart_stalled and waited > self.rules.stall_s

    def _stall(self, state: dict[str, Any]) -> dict[str, Any]:
        """The failure that a stall is, with all stacks in a file."""
        assert self.child is not None, "a worker stalls"
        path = self.root / "logs" / f"stalled-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        standing, text = processes.standing(self.root, self.child.pid)
        with contextlib.suppress(OSError):  # a full disk is the worker's to report
            path.write_text(text)
        limit = state["stall_s"]
        then = (
            f"After {limit:.0f} s more it is started again." if self.rules.restart_stalled else ""
        )
        cause = f"no progress for {limit:.0f} s: {standing or 'no stack could be read'}."
        self._event(state["stage"], "stalled", cause=cause, stacks=str(path))
        return {
            "cause": cause,
            "trace": "",
            "category": "stalled",
            "remedy": f"All stacks: {path}. {then}".strip(),
            "ours": False,
            "since_s": time.monotonic(),
        }

    def _end_all(self, child: subprocess.Popen) -> None:
        """The worker and every process below it; those it left are our children now. Told once more to stop,
        it still ends them all.
        """
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_IGN)
        try:
            self._end(child)
        finally:
            for sign, handler in self.handlers.items():
                signal.signal(sign, handler)

    def _end(self, child: subprocess.Popen) -> None:
        self.say()
        if child.poll() is None:
            child.terminate()
            child.send_signal(signal.SIGCONT)  # one that is stopped hears it then
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(processes.END_S if self.said["stalled"] else STOP_S)
            child.kill()
            child.wait()
        processes.end(processes.descendants(os.getpid()))

    def _failure(self, code: int, errors_from: int, oom_kills: int) -> dict[str, Any]:
        """Why the worker ended: as it said itself, or as its exit code and its last words tell."""
        if self.said["stalled"]:
            return self.said["stalled"]
        if full := now.full_disk(self.root):  # then neither the state nor a log may say it
            return full
        state = self._state()
        if state.get("try") == self.said["try"] and state["state"] == "FAILED":
            return state["failure"]
        with open(self.root / "logs" / LOGS["stderr"], "rb") as file:
            file.seek(errors_from)
            words = file.read().decode(errors="replace")
        if code == -signal.SIGKILL:
            killed = now.died(
                f"the worker {self.child.pid if self.child else ''} was killed by signal 9"
            )
            if _oom_kills() > oom_kills:
                killed["cause"] = "the system killed a process for want of memory"
            return killed
        found = first_cause([words])
        if found:
            return failure_of(found.line, "")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return failure_of(f"the worker ended by {how} without a word", "")

    def _reached(self) -> tuple[int, int]:
        """How far the run has come, to tell tries that get on from tries in vain."""
        state = self._state()
        if state.get("stage") not in now.STAGES:
            return (-1, -1)
        return now.STAGES.index(state["stage"]), state["done"]

    def _state(self) -> dict[str, Any]:
        """What the stages wrote last, as it stands there; empty when they wrote nothing."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.root / "state.json").read_text())
        return {}

    def _give_up(self, failure: dict[str, Any], why_not: str, code: int) -> None:
        """The run has failed. A refused command leaves a finished run what it was."""
        failure = {**failure, "cause": failure["cause"] + why_not}
        self.said["failure"] = failure
        if code == WRONG_USE and failure["category"] != "disk full":
            return  # the worker has said it, and written it down if a stage had begun
        if (self.root / "state.json").exists():
            fail(self.root, failure)
        _tell(f"{failure['category']}: {failure['cause']} {failure['remedy']}")

    def _pause(self, failure: dict[str, Any], in_vain: int) -> None:
        wait_s = min(self.rules.backoff_s * 2 ** max(in_vain - 1, 0), BACKOFF_MOST_S)
        self.said["restarts"] += 1
        self.said.update(failure=failure, stalled=None, waits_until=time.time() + wait_s)
        self.say()
        cause = {key: failure[key] for key in ("cause", "category")}
        self._event("run", "restart", number=self.said["restarts"], wait_s=wait_s, **cause)
        _tell(
            f"{failure['category']}: {failure['cause']}; restart {self.said['restarts']} in {wait_s:.0f} s"
        )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))
            self.say()

    def _event(self, stage: str, kind: str, **fields: Any) -> None:
        with contextlib.suppress(UserError, OSError):
            event(self.root, stage, kind, **fields)

    def say(self) -> None:
        """Write supervisor.json."""
        self.said["heartbeat_at"] = time.time()
        if self.child is not None and not self.root.is_dir():
            return  # somebody has deleted it: it stays so
        with contextlib.suppress(UserError, OSError):
            write_json(self.root / now.SUPERVISOR, self.said)


class _Echo:
    """Shows what is added to a log, as long as there is someone to show it to."""

    def __init__(self, path: Path, to: IO[str]) -> None:
        self._file, self._to = open(path, "rb"), to  # noqa: SIM115
        self._file.seek(0, os.SEEK_END)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def show(self) -> None:
        """What is new."""
        new = self._file.read()
        if new:
            with contextlib.suppress(OSError, ValueError):  # its terminal is gone
                self._to.write(self._decode(new))
                self._to.flush()


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"draftsmith: {text}", file=sys.stderr, flush=True)


def _why_not(failure: dict[str, Any], in_vain: int, rules: SuperviseConfig) -> str | None:
    """Why the worker is not to be started again, as a comment on the failure; None: it is."""
    if failure["category"] in FINAL or (failure["ours"] and failure["category"] not in TRANSIENT):
        return ""
    if in_vain >= rules.retries:
        return f" (after {in_vain} restarts that came no further)" if in_vain else ""
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _oom_kills() -> int:
    """Processes that the system has killed for want of memory in this control group."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                top = Path("/sys/fs/cgroup") / controllers
                name = "memory.oom_control" if controllers else "memory.events"
                # in a container the group's own path may not be there: its files are at the top
                for folder in (top / path.lstrip("/"), top):
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        return int((folder / name).read_text().split("oom_kill ")[1].split()[0])
    return 0
