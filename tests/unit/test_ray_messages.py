"""What a user of a Ray cluster is told: no cluster is needed for these. A real one: tests/e2e/test_ray.py."""

import socket
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from runs import write_config

from draftsmith import __version__, configfile, shared
from draftsmith.config import EngineConfig
from draftsmith.core import UserError
from draftsmith.engines import Tasks, for_workers, refusals
from draftsmith.engines.cluster import Cluster
from draftsmith.shared import marked


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UserError, match=r"engine.kind: found ray, which is not installed.*draftsmith\[ray\]"
    ):
        Cluster(EngineConfig(kind="ray"), 0)


@pytest.mark.parametrize("address", ["nowhere", "10.0.0.1", "http://10.0.0.1:6379"])
def test_an_address_is_of_a_form(address):
    with pytest.raises(ValueError, match="auto, HOST:PORT or ray://HOST:PORT"):
        EngineConfig(kind="ray", address=address)
    with pytest.raises(ValueError, match=r"needs engine.kind: ray"):
        EngineConfig(address="auto")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_where_nothing_answers(scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=f"127.0.0.1:{port}, where nothing answers.*refused"):
        refusals.reach(f"{scheme}127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Version mismatch: The cluster was started with: Ray: 2.40.0 Python: 3.10.1",
            "ray --version",
        ),
        ("Could not find any running Ray instance.", "after `ray start`"),
        ("Can't find a `node_ip_address.json` file from /tmp/ray", "ray://HOST:10001"),
        ("Ray Client requires pip package `ray[client]`.", "ray[client]"),
    ],
)
def test_why_a_cluster_cannot_be_joined(said, told):
    error = refusals.refused("auto", RuntimeError(said))
    assert "engine.address: auto" in str(error) and said[:40] in str(error) and told in str(error)


def test_a_worker_looks_at_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "SEEN_S", 0.0)
    with marked([str(tmp_path / "features"), "s3://bucket/features"]) as marks:
        assert len(marks) == 1
        refusals.unlike(__version__, marks, 0)
    with pytest.raises(UserError, match=r"no .*features as the driver sees it.*s3://"):
        refusals.unlike(__version__, marks, 0)
    with pytest.raises(UserError, match="and 0.0.0 where it was started"):
        refusals.unlike("0.0.0", [], 0)
    assert list((tmp_path / "features").iterdir()) == []


def test_workers_are_started_in_other_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = configfile.load(write_config(tmp_path), {"run": "runs/mine"})
    theirs = for_workers(cfg)
    assert (
        theirs.run == str(tmp_path / "runs" / "mine") and theirs.store == f"{theirs.run}/features"
    )
    distant = configfile.load(write_config(tmp_path), {"features.store": "s3://bucket/x"})
    assert for_workers(distant).store == "s3://bucket/x"


@dataclass(frozen=True, eq=False)
class Call:
    worker: Any
    ask: Any


class Lossy:
    """Stands for Ray and its cluster: actors live here, and every third of their answers is lost on the way."""

    class Unavailable(Exception):
        pass

    errors, gpus, a_place = (Unavailable,), 0, "a CPU"
    exceptions = SimpleNamespace(ActorUnavailableError=Unavailable)

    def __init__(self) -> None:
        self.ray, self.count = self, 0

    def start(self, kind, args, *, restarts):
        worker = kind(*args)
        return SimpleNamespace(turn=SimpleNamespace(remote=lambda ask: Call(worker, ask)))

    def get(self, turn):
        answer = turn.worker.turn(turn.ask)  # it arrives; the answer may not
        self.count += 1
        assert self.count < 500, "a worker that waits for ever"
        if self.count % 3 == 0:
            raise self.Unavailable("lost")
        return answer

    def wait(self, turns, timeout):
        return turns[:1], turns[1:]

    def why(self, error, where):
        return f"a worker on {where}: {error}"

    answers = lambda self: True  # noqa: E731
    room = lambda self: 2  # noqa: E731
    end = lambda self, actor: None  # noqa: E731
    is_node_loss = lambda self, error: True  # noqa: E731
    described = lambda self: ""  # noqa: E731


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_that_are_lost_come_again(workers, monkeypatch):
    """No worker that lives is left waiting for a task, and its last word is heard."""
    from draftsmith.engines import ray

    made, said, lost = [], [], []
    monkeypatch.setattr(ray, "TURN_S", 0.05)

    def work(tasks, say, done):
        for number, payload in tasks:
            made.append(payload)
            say(number)
            done(number)

    tasks = Tasks("extract", work, list(range(20)), str, said.append, lambda *x: lost.append(x))
    cfg = SimpleNamespace(engine=SimpleNamespace(wait_s=5.0))
    ray._Pool(cfg, tasks, Lossy(), workers, []).run()
    assert set(made) == {str(n) for n in range(20)} and set(said) == set(range(20)) and lost
