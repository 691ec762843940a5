"""Stages on a real Ray cluster of several nodes, processes of this machine. Slow, and ray is no test dependency:
pip install 'draftsmith[ray]' first.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import contents, environment, resume

pytest.importorskip("ray")
from rays import nodes, raylet  # noqa: E402

from draftsmith.monitor.processes import descendants  # noqa: E402

pytestmark = pytest.mark.slow
SMALL = {"extract": {"shard_bytes": 100_000, "tokens_per_batch": 128}}


def started(stage: str, config: Path, address: str, *more: str) -> subprocess.Popen[str]:
    """draftsmith STAGE on that cluster."""
    words = [stage, str(config), "--engine.kind", "ray", "--engine.address", address, *more]
    with open(config.parent / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "draftsmith.cli", *words],
            stdout=log, stderr=log, env=environment(), text=True,
        )  # fmt: skip


def log_of(config: Path) -> str:
    return (config.parent / "log").read_text()


def wait_for(what, config: Path, process: subprocess.Popen[str], timeout_s: float = 240) -> None:
    """Until `what()`; with the log when that never comes."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end and process.poll() is None, log_of(config)
        time.sleep(0.02)


def ended(config: Path, process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(300)
    finally:
        process.kill()


def begun_work(config: Path):
    def seen() -> bool:
        return " a worker on " in log_of(config)

    return seen


def events(config: Path, kind: str) -> list[dict]:
    lines = (config.parent / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture(scope="module")
def cluster():
    with nodes(3) as found:
        yield found


@pytest.fixture(scope="module")
def alone(extracted, tmp_path_factory) -> Path:
    """A local extraction into many shards."""
    config = resume(extracted, tmp_path_factory.mktemp("alone"), "tokenize", **SMALL)
    words = [sys.executable, "-m", "draftsmith.cli", "extract", str(config)]
    subprocess.run(words, check=True, env=environment())
    return config.parent / "run"


def pids(config: Path) -> list[int]:
    """Of the workers, as they were born."""
    return [
        int(pid) for pid in re.findall(r" a worker on \S+, process (\d+)$", log_of(config), re.M)
    ]


def test_a_node_is_killed_and_one_added(cluster, extracted, alone, tmp_path):
    """The workers of two nodes stand still until the one of the new node has made shards."""
    config = resume(extracted, tmp_path, "tokenize", **SMALL)
    store = tmp_path / "run" / "features"
    process = started("extract", config, cluster.address)
    shards = lambda: len(list(store.glob("shard-*")))  # noqa: E731
    stopped: list[int] = []

    def all_born() -> bool:
        others = pids(config)[1:]
        for pid in set(others) - set(stopped):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        if shards() >= 2 and pids(config)[0] not in stopped:
            os.kill(pids(config)[0], signal.SIGSTOP)
            stopped.append(pids(config)[0])
        return len(stopped) == 3

    wait_for(all_born, config, process)
    made, first = shards(), pids(config)[0]
    lost = next(n for n in cluster.workers if first in descendants(raylet(n)))
    cluster.workers.remove(lost)
    cluster.kill(lost)
    cluster.add()
    wait_for(lambda: len(pids(config)) == 4 and shards() > made + 4, config, process)
    for pid in set(stopped) - {first}:
        os.kill(pid, signal.SIGCONT)
    assert ended(config, process) == 0, log_of(config)
    (event,) = events(config, "worker_lost")
    assert event["shards"], event
    assert contents(store) == contents(alone / "features")
    assert shards() > 20


def test_a_killed_worker_is_started_again_by_ray(cluster, extracted, alone, tmp_path):
    config = resume(extracted, tmp_path, "tokenize", **SMALL)
    process = started("extract", config, cluster.address, "--extract.workers", "1")
    store = tmp_path / "run" / "features"
    wait_for(lambda: list(store.glob("shard-*")), config, process)
    pid = int(log_of(config).split(", process ")[1].split()[0])
    os.kill(pid, signal.SIGKILL)
    assert ended(config, process) == 0, log_of(config)
    assert "died (exit" in log_of(config) and events(config, "worker_lost")
    assert contents(store) == contents(alone / "features")


def test_two_drivers_make_one_store(cluster, extracted, alone, tmp_path):
    """In two runs' folders, on one store: each makes what is missing when it begins."""
    configs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        configs.append(resume(extracted, tmp_path / name, "tokenize", **SMALL))
    store = ["--features.store", str(tmp_path / "store"), "--extract.workers", "1"]
    both = [started("extract", config, cluster.address, *store) for config in configs]
    for config, process in zip(configs, both, strict=True):
        assert ended(config, process) == 0, log_of(config)
    assert contents(tmp_path / "store") == contents(alone / "features")


def test_answers_are_those_of_this_process(cluster, extracted, tmp_path):
    config = resume(extracted, tmp_path, "prepare")
    process = started("regenerate", config, cluster.address)
    assert ended(config, process) == 0, log_of(config)
    answers = Path("data") / "answers"
    assert contents(tmp_path / "run" / answers) == contents(extracted / answers)


def test_places_that_never_come(cluster, extracted, tmp_path):
    """Another driver holds them all: told for how long, and then given up."""
    import ray

    config = resume(extracted, tmp_path, "tokenize")
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        holder = ray.remote(num_cpus=1)(lambda s: time.sleep(s))
        held = [holder.remote(600) for _ in range(3)]
        time.sleep(1)
        process = started("extract", config, cluster.address, "--engine.wait_s", "35")
        assert ended(config, process) == 2
        del held
    finally:
        ray.shutdown()
    said = log_of(config)
    assert "workers wait for a CPU since 3" in said and "3 CPUs (0 free)" in said
    assert "found no worker has had a CPU for 35 s" in said and "Traceback" not in said


def test_a_cluster_without_gpus(cluster, extracted, tmp_path):
    config = resume(extracted, tmp_path, "tokenize")
    process = started("extract", config, cluster.address, "--target.device", "auto")
    assert ended(config, process) == 2
    assert "GPUs for the target" in log_of(config) and "Traceback" not in log_of(config)


def test_the_cluster_ends_in_mid_run(extracted, alone, tmp_path):
    config = resume(extracted, tmp_path, "tokenize", **SMALL)
    with nodes(1) as found:
        process = started("extract", config, found.address)
        store = tmp_path / "run" / "features"
        wait_for(lambda: list(store.glob("shard-*")), config, process)
        for node in [*found.workers, found.cluster.head_node]:
            found.kill(node)
        assert ended(config, process) == 1, log_of(config)
    assert "Ray cluster" in log_of(config)
    words = [sys.executable, "-m", "draftsmith.cli", "extract", str(config)]
    subprocess.run(words, check=True, env=environment())  # goes on without it
    assert contents(store) == contents(alone / "features")
