"""Real S3 server processes for tests: moto (knows every rule, keeps nothing), nanio (checks
signatures), localbucket (keeps files when it is killed), and a proxy that answers 503 now and then.
"""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

KEY, SECRET, BUCKET = "test-key", "test-secret", "bkt"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process that can be killed and started again on its port."""

    def __init__(self, command: Callable[[int], list[str]], env: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command, self._env = command(self.port), {**os.environ, **env}
        self.start()

    def start(self) -> None:
        """Start, and wait until it answers."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(self._command, env=self._env, **quiet)
        end = time.time() + 60
        while time.time() < end:
            assert self._process.poll() is None, f"{self._command} ended"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"{self._command} never answered")

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()


def moto() -> Server:
    """moto, with the bucket made."""
    server = Server(
        lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], {}
    )
    httpx.put(f"{server.url}/{BUCKET}").raise_for_status()
    return server


def nanio(folder: Path) -> Server:
    """nanio on a folder, with the bucket made."""
    (folder / BUCKET).mkdir(parents=True)
    program = str(Path(sys.executable).parent / "nanio")
    return Server(
        lambda port: [program, "serve", "--host", "127.0.0.1", "--port", str(port),
                      "--data-dir", str(folder)],
        {"NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET},
    )  # fmt: skip


def localbucket(folder: Path) -> Server:
    """localbucket on a folder, with the bucket made: what it took survives a kill."""
    (folder / BUCKET).mkdir(parents=True)
    program = str(Path(sys.executable).parent / "localbucket")
    return Server(lambda port: [program, "--port", str(port), str(folder)], {})


def use(monkeypatch: pytest.MonkeyPatch, url: str, patience_s: float = 30) -> None:
    """Point draftsmith at a server, as a user does."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("DRAFTSMITH_S3_PATIENCE_S", str(patience_s))


class Busy:
    """A proxy that does not serve two requests of three, and forwards the third. `how`: 503 answers
    so; cut hangs up in the middle of the request; slow serves all, `wait_s` later.
    """

    def __init__(self, url: str, how: str = "503", wait_s: float = 0.2) -> None:
        upstream, outer = urlsplit(url).netloc, self
        self.refused = self.served = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                refuse = how != "slow" and (outer.refused + outer.served) % 3 != 2
                outer.refused += refuse
                if refuse and how == "cut":
                    self.rfile.read(size // 2)
                    self.close_connection = True
                    return
                body = self.rfile.read(size)
                if how == "slow":
                    time.sleep(wait_s)
                if refuse:
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                outer.served += 1
                link = http.client.HTTPConnection(upstream, timeout=30)
                link.request(self.command, self.path, body, dict(self.headers))
                answer = link.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                length = answer.headers["Content-Length"] if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _any

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
