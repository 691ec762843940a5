"""A real Ray cluster of several nodes, as processes of this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from draftsmith.monitor.processes import descendants

FAST = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""A dead node is seen after two seconds, in place of a quarter of a minute."""


class Nodes:
    """The cluster; `address` is its head's."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.address = cluster, cluster.address
        self.workers: list[Any] = []

    def add(self, cpus: int = 1, **more: Any) -> Any:
        """A node that holds workers."""
        node = self.cluster.add_node(
            num_cpus=cpus, object_store_memory=80 << 20, include_dashboard=False, **more
        )
        self.workers.append(node)
        return node

    def kill(self, node: Any) -> None:
        """As if its machine lost power: -9 for its raylet and all that it started."""
        for process in [info.process for infos in node.all_processes.values() for info in infos]:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait_for(self, count: int) -> None:
        """Until so many nodes are known to live."""
        self.cluster.wait_for_nodes(count)


def raylet(node: Any) -> int:
    """The process that starts a node's workers."""
    return node.all_processes["raylet"][0].process.pid


@contextlib.contextmanager
def nodes(workers: int, *, gpus: int = 0) -> Iterator[Nodes]:
    """A head that holds no worker, and so many nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_raylet_start_wait_time_s="120")  # a busy machine
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False,
            "_system_config": FAST,
        },
    )  # fmt: skip
    found = Nodes(cluster)
    try:
        for _ in range(workers):
            found.add(**({"num_gpus": gpus} if gpus else {}))
        time.sleep(0.5)
        yield found
    finally:
        cluster.shutdown()
