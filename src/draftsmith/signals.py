"""SIGTERM as normal unwinding, from the first import on, so that every `finally` runs."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from draftsmith.core import Stopped

AGAIN_S = 10.0


@contextlib.contextmanager
def stop_is_noted() -> Iterator[Callable[[], bool]]:
    """For the time of the block, SIGTERM or Ctrl-C is only noted: what it yields says so. A second Ctrl-C, or
    a SIGTERM AGAIN_S later, raises Stopped: launchers repeat theirs.
    """
    told: float | None = None

    def handler(signum: int, frame: Any) -> None:
        nonlocal told
        now = time.monotonic()
        if told is None:
            told = now
            print("told to stop: after this step", flush=True)
        elif signum == signal.SIGINT or now - told > AGAIN_S:
            raise Stopped("told twice")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {sign: signal.signal(sign, handler) for sign in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: told is not None
    finally:
        for sign, old in before.items():
            signal.signal(sign, old)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """For the time of the block, SIGTERM raises Stopped in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: Any) -> None:
        raise Stopped("SIGTERM")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
