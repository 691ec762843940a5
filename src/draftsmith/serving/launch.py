"""Starting a server from the user's own command, waiting until it answers, stopping it with all its
processes.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from draftsmith.core import UserError
from draftsmith.monitor import failures
from draftsmith.tether import tethered

STOP_S = 30


class Launched:
    """A server that runs on this machine. `options` and a free port are added to the command."""

    def __init__(self, command: str, options: list[str], log: Path, *, where: str) -> None:
        port = _free_port()
        self.args = [*shlex.split(command), *options, "--port", str(port)]
        self.url = f"http://127.0.0.1:{port}"
        self.log, self.where = log, where
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self._process = self._start()

    def _start(self) -> subprocess.Popen:
        with open(self.log, "a") as out:
            out.write(shlex.join(self.args) + "\n")
            out.flush()
            if shutil.which(self.args[0]) is None:
                raise UserError(
                    where=self.where,
                    found=f"{self.args[0]}, which is no program here",
                    expected="a command that serves the target",
                    remedy="Try it in a shell.",
                )
            return subprocess.Popen(
                tethered(self.args), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def alive(self) -> bool:
        """Whether the process that was started still runs."""
        return self._process.poll() is None

    def revive(self, wait_s: float) -> None:
        """Start it again, on the same port, and wait until it answers."""
        self.stop()  # what its process left behind
        self._process = self._start()
        self.wait(wait_s)

    def wait(self, wait_s: float) -> None:
        """Return once it answers. Raises UserError with the first cause in its log when it does not."""
        begun = said = time.monotonic()
        while not _answers(self.url):
            code = self._process.poll()
            if code is not None:
                raise UserError(
                    where=self.where,
                    found=f"a server that ended with exit code {code}: {first_cause(self.log)}",
                    expected="one that comes up",
                    remedy=f"Its log: {self.log}",
                )
            now = time.monotonic()
            if now - begun > wait_s:
                raise UserError(
                    where=self.where,
                    found=f"a server that does not answer after {wait_s:.0f} s",
                    expected=f"{self.url}/health to answer 200",
                    remedy=f"Its log: {self.log}. Give it longer if it is still loading.",
                )
            if now - said > 20:
                said = now
                print(f"waiting for the server, {now - begun:.0f} s ({self.log})", flush=True)
            time.sleep(1)

    def stop(self) -> None:
        """End it with all its processes."""
        _stop(self._process)


@contextlib.contextmanager
def running(
    command: str, options: list[str], log: Path, *, wait_s: float, where: str = "--command"
) -> Iterator[str]:
    """The server's URL while the block lasts. Raises UserError when it does not come up; one that is
    raised in the block is told with the first cause in the server's log, where there is one.
    """
    server = Launched(command, options, log, where=where)
    try:
        server.wait(wait_s)
        try:
            yield server.url
        except UserError as error:
            if cause := failures.first_cause([log.read_text(errors="replace")]):
                parts = error.parts
                found = f"{parts['found']}; its first cause is {cause.line[:300]}"
                raise UserError(**{**parts, "found": found, "remedy": f"Its log: {log}"}) from error
            raise
    finally:
        server.stop()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        code = httpx.get(f"{url}/health", timeout=5).status_code
        if code == 404:  # a server without a health check
            code = httpx.get(f"{url}/v1/models", timeout=5).status_code
        return code == 200
    return False


def first_cause(log: Path) -> str:
    """The first error in a server's log that is not an echo of another one; servers end with
    'see root cause above'.
    """
    text = log.read_text(errors="replace")
    if cause := failures.first_cause([text]):
        return cause.line[:300]
    lines = text.splitlines()
    last = next((line for line in reversed(lines[1:]) if line.strip()), "")
    return f"no error in its log, which ends with {last[:200]!r}"


def _stop(process: subprocess.Popen) -> None:
    """SIGTERM to the whole session, SIGKILL to what is left: no orphan, no held GPU."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    deadline = time.monotonic() + STOP_S
    while _session_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)  # a GPU is free only when its last process is gone


def _session_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
