"""A Ray cluster as the driver uses it: joined or started here, asked for room, and its errors in words that
say what to do.
"""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from draftsmith import __version__
from draftsmith.config import EngineConfig
from draftsmith.core import FaultFound, UserError
from draftsmith.engines.refusals import imported, reach, refused

STORE_BYTES = 200 << 20
"""Ray's own object store, of a cluster that is started here: only token ids go through it."""
GONE_S = 30.0
"""Without an answer of the head; after a minute Ray ends the whole process, without unwinding."""
LOOK_S = 2.0
CLIENT = "ray://"


class Cluster:
    """Joined for the time of a block. `gpus`: of one worker; 0: workers on CPUs."""

    def __init__(self, engine: EngineConfig, gpus: int) -> None:
        self.gpus, self._engine = gpus, engine
        self._head, self._gone = "", False
        self._looked_at, self._answered_at = 0.0, time.monotonic()
        self.ray: Any = imported()
        self.errors = (self.ray.exceptions.RayError,)
        self.a_place = f"{gpus} GPU{'s' if gpus > 1 else ''} of one node" if gpus else "a CPU"

    def __enter__(self) -> Self:
        address = self._engine.address or "local"
        reach(address)
        # what workers write on stderr comes into this process's log, line by line and whole
        os.environ.update(RAY_COLOR_PREFIX="0", RAY_DEDUP_LOGS="0")
        mine = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        handlers = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.ray.init(
                address=address,
                log_to_driver=True,
                logging_level="WARNING",
                **(mine if address == "local" else {}),
            )
        except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
            raise refused(address, error) from None
        finally:
            with suppress(
                ValueError
            ):  # not in the main thread; Ray's own would end us without unwinding
                for sign, handler in handlers.items():
                    signal.signal(sign, handler)
        context = self.ray.get_runtime_context()
        # from outside, the head's own address may not be reachable
        outside = address.startswith(CLIENT)
        self._head = address.removeprefix(CLIENT).strip("/") if outside else context.gcs_address
        try:
            self._check()
        except BaseException:
            self.ray.shutdown()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._gone:  # it would wait for the head
            self.ray.shutdown()

    def answers(self) -> bool:
        """Whether the head can be asked now. Raises FaultFound when it could not for GONE_S."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            host, _, port = self._head.rpartition(":")
            with suppress(OSError):
                socket.create_connection((host, int(port)), LOOK_S).close()
                self._answered_at = time.monotonic()
        if now - self._answered_at > GONE_S:
            self._gone = True
            raise FaultFound(f"the Ray cluster at {self._head} does not answer for {GONE_S:.0f} s")
        return now - self._answered_at < 2 * LOOK_S

    def _asked(self, call: Callable[[], Any]) -> Any:
        """What the head says. Where it is gone, Ray's call does not come back: another thread makes it."""
        said: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

        def ask() -> None:
            try:
                said.put((call(), None))
            except Exception as error:  # raised below, where it was asked
                said.put((None, error))

        threading.Thread(target=ask, daemon=True).start()
        while True:
            try:
                answer, error = said.get(timeout=LOOK_S)
            except Empty:
                self.answers()
                continue
            if error is not None:
                raise error
            return answer

    def _nodes(self) -> list[dict[str, float]]:
        """What each living node has."""
        nodes = self._asked(self.ray.nodes)
        return [node["Resources"] for node in nodes if node["Alive"]]

    def _check(self) -> None:
        """Refuse a cluster on which no worker could ever run."""
        nodes = self._nodes()
        most = max((int(node.get("GPU", 0)) for node in nodes), default=0)
        if self.gpus and not most:
            raise UserError(
                where="engine",
                found=f"a Ray cluster of {self.described()}",
                expected="GPUs for the target",
                remedy="Add nodes with GPUs, or set target.device: cpu.",
            )
        if most < self.gpus:
            raise UserError(
                where="target.gpus_per_replica",
                found=f"{self.gpus}, and at most {most} GPUs on a node of the Ray cluster",
                expected="a copy of the target on one node",
                remedy="Lower it, or add larger nodes.",
            )

    def room(self) -> int:
        """Workers that the living nodes can hold."""
        name, each = ("GPU", self.gpus) if self.gpus else ("CPU", 1)
        return sum(int(node.get(name, 0) // each) for node in self._nodes())

    def described(self) -> str:
        """Nodes and what they have, in words."""
        nodes, free = self._nodes(), self._asked(self.ray.available_resources)
        names = ("GPU", "CPU") if self.gpus else ("CPU",)
        parts = [
            f"{sum(node.get(name, 0) for node in nodes):.0f} {name}s ({free.get(name, 0):.0f} free)"
            for name in names
        ]
        return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {', '.join(parts)}"

    def start(self, kind: type, args: Sequence[Any], *, restarts: int) -> Any:
        """An actor, wherever Ray places it, now or when there is room."""
        options = {"num_gpus": self.gpus, "num_cpus": 1, "max_restarts": restarts}
        actor = self.ray.remote(kind).options(**options, max_task_retries=0)
        return self._asked(lambda: actor.remote(*args))

    def end(self, actor: Any) -> None:
        """Its process, too."""
        if self._gone:
            return
        with suppress(Exception):  # it may be dead, or the cluster gone
            self.ray.kill(actor, no_restart=True)

    def is_node_loss(self, error: Exception) -> bool:
        """Whether an actor died with its node: not its own fault, nor its task's."""
        if isinstance(error, self.ray.exceptions.OutOfMemoryError):
            return False
        lost = r"node (has )?(died|was|is) ?|raylet (has )?(died|crashed|failed|terminated|was|is)"
        return bool(re.search(lost, str(error), re.IGNORECASE))

    def why(self, error: Exception, where: str | None) -> str:
        """An actor's death, in a line."""
        worker = f"a worker on {where}" if where else "a worker that had not begun"
        if self.is_node_loss(error):
            return f"{worker} died (exit with its node)"
        if isinstance(error, self.ray.exceptions.OutOfMemoryError):
            return (
                f"{worker} died (exit: Ray's memory monitor killed it, its node was out of memory)"
            )
        if isinstance(error, self.ray.exceptions.ActorUnavailableError):
            return f"{worker} died (exit, or its node's: it does not answer)"
        detail = re.search(r"Worker exit detail: (.*)", str(error)) or re.search(
            r"error code \d+\. [^.]*", str(error)
        )
        first = detail.group(0) if detail else next(iter(str(error).splitlines()), "")
        return f"{worker} died (exit: {first[:200]})"

    def refusal(self, error: Exception) -> UserError:
        """A worker that could not begin: what it said."""
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        last = next(
            (x for x in reversed(said) if re.match(r"[\w.]*(Error|Exception)\b", x)), said[-1]
        )
        return UserError(
            where="engine",
            found=f"a Ray worker that cannot run draftsmith {__version__} ({last[:300]})",
            expected="the same Python packages on every node",
            remedy="Install draftsmith there as here, in the Python that runs `ray start`.",
        )

    def never_came(self, wait_s: float) -> UserError:
        """Nobody had a place in all that time."""
        return UserError(
            where="engine",
            found=f"no worker has had {self.a_place} for {wait_s:.0f} s; the cluster has "
            f"{self.described()}",
            expected="room for at least one worker",
            remedy="See `ray status`: another job may hold them; or raise engine.wait_s.",
        )
