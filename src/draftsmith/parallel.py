"""Work spread over processes, results in order, a bounded number of items on the way.

A worker ends with its parent, however that died.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def num_workers(asked: int | str) -> int:
    """Processes to use: as asked for, or a core each."""
    return len(os.sched_getaffinity(0)) if asked == "auto" else int(asked)


def ordered_map(
    work: Callable[[Item], Made],
    items: Iterable[Item],
    *,
    workers: int,
    setup: Callable[..., None],
    setup_args: tuple[Any, ...],
) -> Iterator[Made]:
    """`work(item)` of every item, in order; `setup(*setup_args)` runs first in each process. One
    worker means this process.
    """
    if workers == 1:
        setup(*setup_args)
        yield from map(work, items)
        return
    # This process has threads and cannot be forked. A server of forks imports what `work` needs once:
    # seconds and hundreds of MB (torch) that each spawned worker would take for itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    pool = ProcessPoolExecutor(workers, context, _begin, (setup, setup_args))
    waiting: deque[Future[Made]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(setup: Callable[..., None], setup_args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is enough
    setup(*setup_args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool's worker has a parent"
    with contextlib.suppress(OSError):
        wait([parent.sentinel])
    os._exit(1)
