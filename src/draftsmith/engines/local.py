"""Worker processes on this machine, each on its own GPUs. Workers ask for tasks one at a time, ahead of
need; the tasks of one that dies go to others, and a new worker takes its place, a few times over.

A task must leave the same result however often it is begun: a shard's file is that.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch

from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, Stopped, UserError
from draftsmith.signals import sigterm_unwinds

RESTARTS = 3  # in all; a worker that dies every time will not mend
STOP_S = 20

Say = Callable[[Any], None]
Done = Callable[[int], None]
Work = Callable[[Iterator[tuple[int, Any]], Say, Done], None]


@dataclass
class _Worker:
    process: Any
    line: Connection
    gpus: str | None
    tasks: set[int] = field(default_factory=set)
    ending: bool = False


def gpus_of_workers(
    cfg: RunConfig, workers: int | Literal["auto"], *, gpu: bool
) -> list[str] | list[None]:
    """The GPUs of each worker, as CUDA_VISIBLE_DEVICES names them; None for one on a CPU."""
    if not gpu:
        return [None] * (1 if workers == "auto" else workers)
    count, each = torch.cuda.device_count(), cfg.target.gpus_per_replica
    most = count // each
    if most == 0:
        raise UserError(
            where="target.gpus_per_replica",
            found=f"{each}, and {count} GPUs here",
            expected="no more than there are",
            remedy="Lower it, or use a larger machine.",
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = named if len(named) == count else [str(i) for i in range(count)]
    wanted = most if workers == "auto" else min(most, workers)
    return [",".join(names[i * each : (i + 1) * each]) for i in range(wanted)]


def run_tasks(
    work: Work,
    tasks: list[int],
    *,
    load: Callable[[int], Any],
    gpus: list[str] | list[None],
    on_message: Callable[[Any], None],
    on_loss: Callable[[str, list[int]], None],
) -> None:
    """Until every task is done: `work(iterator of (task, load(task)), say, done)` runs in a process
    for each entry of `gpus` (CUDA_VISIBLE_DEVICES, or None); what it says reaches `on_message`. A
    worker's error is raised here; its death and unfinished tasks are told to `on_loss`, and are a
    FaultFound once there were RESTARTS.
    """
    spawn = multiprocessing.get_context("spawn")
    todo, left = deque(tasks), set(tasks)
    workers = [_start(spawn, work, one) for one in gpus[: len(tasks)]]
    restarts = 0
    try:
        while left:
            ready = wait([w.line for w in workers])
            for worker in [w for w in workers if w.line in ready]:
                try:
                    kind, value = worker.line.recv()
                    if kind == "want":
                        _hand_out(worker, todo, load)
                except (EOFError, OSError):
                    workers.remove(worker)
                    worker.process.join(STOP_S)
                    if worker.ending and not worker.tasks:
                        continue
                    restarts += 1
                    said = f"worker {worker.process.pid} died ({_exit(worker.process.exitcode)})"
                    on_loss(said, sorted(worker.tasks))
                    if restarts > RESTARTS:
                        raise FaultFound(f"{said}, after {RESTARTS} others") from None
                    todo.extendleft(sorted(worker.tasks, reverse=True))
                    workers.append(_start(spawn, work, worker.gpus))
                    continue
                if kind == "said":
                    on_message(value)
                elif kind == "failed":
                    raise value
                elif kind == "done":
                    worker.tasks.discard(value)
                    left.discard(value)
    finally:
        _stop(workers)


def _hand_out(worker: _Worker, todo: deque[int], load: Callable[[int], Any]) -> None:
    if not todo:
        worker.ending = True
        worker.line.send(None)
        return
    worker.tasks.add(todo[0])
    worker.line.send((todo[0], load(todo.popleft())))


def _start(spawn: Any, work: Work, gpus: str | None) -> _Worker:
    here, there = spawn.Pipe()
    process = spawn.Process(target=_live, args=(there, work), daemon=True)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # a child reads it before CUDA starts there
        process.start()
    finally:
        if gpus is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
        if gpus is not None and before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    there.close()
    return _Worker(process, here, gpus)


def _live(line: Connection, work: Work) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sending = threading.Lock()

    def send(kind: str, value: Any = None) -> None:
        with sending:
            line.send((kind, value))

    def tasks() -> Iterator[tuple[int, Any]]:
        while True:
            send("want")
            task = line.recv()
            if task is None:
                return
            yield task

    try:
        with sigterm_unwinds():
            work(tasks(), lambda message: send("said", message), lambda task: send("done", task))
    except (EOFError, Stopped):
        return
    except Exception as error:  # the driver's to raise
        with suppress(OSError):
            send("failed", error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)


def _stop(workers: list[_Worker]) -> None:
    """End all, and kill what does not end: no orphan, no held GPU."""
    for worker in workers:
        if not worker.ending or worker.tasks:
            worker.process.terminate()
    for worker in workers:
        worker.process.join(STOP_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.line.close()


def _exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
