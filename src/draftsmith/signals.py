"""SIGTERM as normal unwinding, from the first import on, so that every `finally` runs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from draftsmith.core import Stopped


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
