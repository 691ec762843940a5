"""Workers as actors of a Ray cluster, one for every `target.gpus_per_replica` GPUs of a node; on CPUs, one a
CPU. Ray places them, and starts one that died again elsewhere; this driver hands out tasks and hears what
workers say. Nothing that a task makes comes this way: a worker writes it where it belongs.

The driver calls turn() of every actor, over and over: it brings tasks, waits a moment, and returns with
what the worker has said since. An actor's life ends with its process; what it had under way goes to others.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal
from uuid import uuid4

from draftsmith import __version__
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, UserError
from draftsmith.engines import Tasks
from draftsmith.engines.cluster import Cluster
from draftsmith.engines.local import Work
from draftsmith.engines.refusals import unlike
from draftsmith.shared import marked

RESTARTS = 3
"""Of one actor by Ray; and how many workers one task may take with it."""
TURN_S = 1.0
GROW_S = 5.0
SAY_S = 30.0


class Worker:
    """The actor. Its constructor runs anew when Ray starts it again: then it has another `life`."""

    def __init__(self, version: str, work: Work, marks: list[str], gpus: int) -> None:
        self.life = uuid4().hex
        self._number, self._heard = 0, 0
        self._unheard: deque[tuple[str, Any]] = deque()
        self._asked: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._said: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        where = f"{socket.gethostname()}, process {os.getpid()}"
        self._said.put(("born", where))
        live = threading.Thread(target=self._live, args=(version, work, marks, gpus), daemon=True)
        live.start()

    def turn(self, ask: "Turn") -> tuple[str, list[tuple[str, Any]]]:
        """Take these tasks; this life, and what was said that the driver has not heard. Either way may be
        lost: a turn that comes again gives its tasks once, and its answer is kept until the next one.
        """
        if ask.life == self.life:
            while self._heard < ask.heard:
                self._unheard.popleft()
                self._heard += 1
            if ask.number > self._number:
                self._number = ask.number
                for task in ask.tasks:
                    self._asked.put(task)
        with suppress(Empty):
            if not self._unheard:
                self._unheard.append(self._said.get(timeout=TURN_S))
            while True:
                self._unheard.append(self._said.get_nowait())
        return self.life, list(self._unheard)

    def _live(self, version: str, work: Work, marks: list[str], gpus: int) -> None:
        try:
            unlike(version, marks, gpus)
            work(
                self._tasks(),
                lambda message: self._said.put(("said", message)),
                lambda number: self._said.put(("done", number)),
            )
            self._said.put(("ended", None))
        except BaseException as error:  # the driver's to raise
            if not isinstance(error, UserError):
                traceback.print_exc()  # Ray brings it into the driver's log
            kind = type(error).__name__
            ours = isinstance(error, UserError | FaultFound)
            self._said.put(("failed", error if ours else RuntimeError(f"{kind}: {error}")))

    def _tasks(self) -> Iterator[tuple[int, Any]]:
        while True:
            self._said.put(("want", None))
            task = self._asked.get()
            if task is None:
                return
            yield task


@dataclass(frozen=True)
class Turn:
    """What an actor is asked, of the life that it was in: its `number` in that life, tasks (None: no more will
    come), and how many of its words were heard.
    """

    life: str | None
    number: int
    tasks: list[tuple[int, Any] | None]
    heard: int


@dataclass
class _Actor:
    """An actor as the driver knows it; `where` is None until it has said its first word, and while it does not
    answer.
    """

    handle: Any
    asked_at: float = field(default_factory=time.monotonic)
    life: str | None = None
    born: str | None = None
    where: str | None = None
    turn: Turn = Turn(None, 0, [], 0)
    heard: int = 0
    tasks: set[int] = field(default_factory=set)
    wants: int = 0
    ending: bool = False


def run_tasks(cfg: RunConfig, tasks: Tasks, *, workers: int | Literal["auto"], gpu: bool) -> None:
    """Until every task is done. A worker's error is raised here. Raises UserError for a cluster that cannot
    be used, FaultFound for a task that kills its workers.
    """
    gpus = cfg.target.gpus_per_replica if gpu and cfg.target.device != "cpu" else 0
    with Cluster(cfg.engine, gpus) as cluster, marked(tasks.folders) as marks:
        pool = _Pool(cfg, tasks, cluster, workers, marks)
        try:
            pool.run()
        finally:
            pool.stop()


class _Pool:
    """The actors of one stage, and what is left to do."""

    def __init__(
        self,
        cfg: RunConfig,
        tasks: Tasks,
        cluster: Cluster,
        workers: int | Literal["auto"],
        marks: list[str],
    ) -> None:
        self._cfg, self._tasks, self._cluster, self._marks = cfg, tasks, cluster, marks
        self._most = len(tasks.numbers) if workers == "auto" else workers
        self._todo, self._left = deque(tasks.numbers), set(tasks.numbers)
        self._turns: dict[Any, _Actor] = {}
        self._took_along: Counter[int] = Counter()
        self._grown_at = self._told_at = -SAY_S
        self._idle_since: float | None = None

    def run(self) -> None:
        """Until nothing is left."""
        ray = self._cluster.ray
        while self._left:
            if self._cluster.answers():
                if time.monotonic() - self._grown_at > GROW_S:
                    self._grow()
                self._say_what_is_awaited()
            ready, _ = ray.wait(list(self._turns), timeout=TURN_S) if self._turns else ([], [])
            for turn in ready:
                self._hear(self._turns.pop(turn), turn)

    def stop(self) -> None:
        """End every actor, and free what it holds."""
        for actor in self._turns.values():
            self._cluster.end(actor.handle)

    def _grow(self) -> None:
        """As many actors as the cluster has room for now, and tasks."""
        self._grown_at = time.monotonic()
        unborn = sum(actor.where is None for actor in self._turns.values())
        room = min(self._most, self._cluster.room()) - len(self._turns)
        for _ in range(min(max(room, 0 if self._turns else 1), len(self._todo) - unborn)):
            args = (__version__, self._tasks.work, self._marks, self._cluster.gpus)
            self._turn(_Actor(self._cluster.start(Worker, args, restarts=RESTARTS)), [])

    def _turn(self, actor: _Actor, tasks: list[tuple[int, Any] | None]) -> None:
        actor.turn = Turn(actor.life, actor.turn.number + 1, tasks, actor.heard)
        self._turns[actor.handle.turn.remote(actor.turn)] = actor

    def _hear(self, actor: _Actor, turn: Any) -> None:
        """What an actor says, and the next turn's tasks."""
        try:
            life, said = self._cluster.ray.get(turn)
        except self._cluster.errors as error:
            self._lost(actor, error)
            return
        if life != actor.life:  # Ray has started it again
            self._requeue(actor)
            actor.life, actor.heard, actor.wants, actor.ending = life, 0, 0, False
        elif actor.where is None:  # it lives, and did not answer for a while
            actor.where = actor.born
        actor.heard += len(said)
        for kind, value in said:
            if kind == "born":
                actor.born = actor.where = value
                print(f"{self._tasks.stage}: a worker on {value}", flush=True)
            elif kind == "said":
                self._tasks.on_message(value)
            elif kind == "done":
                actor.tasks.discard(value)
                self._left.discard(value)
            elif kind == "want":
                actor.wants += 1
            elif kind == "failed":
                self._cluster.end(actor.handle)
                print(f"{self._tasks.stage}: refused on {actor.where}", file=sys.stderr, flush=True)
                raise value
            elif kind == "ended":
                self._cluster.end(actor.handle)
                if not actor.ending:  # it knows that no more is to be done
                    self._left.clear()
                return
        self._turn(actor, self._next(actor))

    def _next(self, actor: _Actor) -> list[tuple[int, Any] | None]:
        given: list[tuple[int, Any] | None] = []
        while actor.wants and not actor.ending:
            actor.wants -= 1
            if not self._todo:
                actor.ending = True
                given.append(None)
                break
            number = self._todo.popleft()
            actor.tasks.add(number)
            given.append((number, self._tasks.load(number)))
        return given

    def _lost(self, actor: _Actor, error: Any) -> None:
        """Its tasks go to others. Ray may start it again: the next turn waits for that."""
        said = self._cluster.why(error, actor.where)
        ended = not isinstance(error, self._cluster.ray.exceptions.ActorUnavailableError)
        if getattr(error, "actor_init_failed", False):
            raise self._cluster.refusal(error)
        held = sorted(actor.tasks)
        if actor.where is not None:
            self._tasks.on_loss(said, held)
        if not self._cluster.is_node_loss(error):
            self._took_along.update(held)
        self._requeue(actor)
        for number in held:
            if self._took_along[number] > RESTARTS:
                raise FaultFound(f"{said}, as {RESTARTS} others that had task {number} under way")
        actor.where, actor.asked_at = None, time.monotonic()
        self._grown_at = -GROW_S
        if not ended:
            self._turns[actor.handle.turn.remote(actor.turn)] = actor  # the same again
            return
        self._cluster.end(actor.handle)
        if not held and not self._cluster.is_node_loss(error):
            raise FaultFound(f"{said}, after {RESTARTS} restarts by Ray")

    def _requeue(self, actor: _Actor) -> None:
        self._todo.extendleft(sorted(actor.tasks & self._left, reverse=True))
        actor.tasks.clear()

    def _say_what_is_awaited(self) -> None:
        """Who waits for a place, and for how long; an error when nobody has had one for engine.wait_s."""
        now = time.monotonic()
        waiting = [actor for actor in self._turns.values() if actor.where is None]
        if len(waiting) < len(self._turns):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if not waiting:
            return
        self._tasks.on_wait()
        since = min(actor.asked_at for actor in waiting)
        if self._idle_since is not None and now - self._idle_since > self._cfg.engine.wait_s:
            raise self._cluster.never_came(self._cfg.engine.wait_s)
        if now - max(since, self._told_at) > SAY_S:
            self._told_at = now
            print(
                f"{self._tasks.stage}: {len(waiting)} of {len(self._turns)} workers wait for "
                f"{self._cluster.a_place} since {now - since:.0f} s; the cluster has "
                f"{self._cluster.described()}",
                flush=True,
            )
