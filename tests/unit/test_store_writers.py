"""Writers that are killed, have no room, or are two: whole shards of one writer each, none lost."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import contents, environment

import s3_servers
from draftsmith import manifest, places
from draftsmith.core import UserError
from draftsmith.files import remove_leftovers, write_atomic
from draftsmith.store.checks import StoreChecks
from draftsmith.store.reader import StoreReader, complete_manifest
from s3_servers import BUCKET
from store_writer import PER_SHARD, SHARDS, sample, write
from stores import inputs


def check(location):
    """No fault, no sample lost; the writer of each shard."""
    place = places.at(location)
    assert not list(StoreChecks(place, complete_manifest(place)).run())
    reader = StoreReader(place)
    assert sorted(reader.sample_ids) == list(range(SHARDS * PER_SHARD))
    writers = []
    for first in range(0, SHARDS * PER_SHARD, PER_SHARD):
        states = [reader.read(i, ("hidden",))["hidden"] for i in range(first, first + PER_SHARD)]
        mine = [
            w for w in (1, 2)
            if all(torch.equal(s, sample(first + k, w).hidden) for k, s in enumerate(states))
        ]  # fmt: skip
        assert len(mine) == 1, f"a shard of no one writer: {first}"
        writers += mine
    return writers


def start(location, writer):
    path = Path(__file__).parents[1]
    found = filter(None, [os.environ.get("PYTHONPATH"), str(path)])
    env = {**environment(), "PYTHONPATH": os.pathsep.join(found)}
    process = subprocess.Popen(
        [sys.executable, str(path / "store_writer.py"), str(location), str(writer)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def go(process):
    process.stdin.write(b"\n")
    process.stdin.flush()


@pytest.mark.parametrize("where", ["local", "s3"])
def test_two_processes_on_one_store(tmp_path, monkeypatch, where):
    server = s3_servers.localbucket(tmp_path / "disk") if where == "s3" else None
    if server:
        s3_servers.use(monkeypatch, server.url)
    location = f"s3://{BUCKET}/two" if server else tmp_path / "store"
    try:
        both = [start(location, writer) for writer in (1, 2)]
        for process in both:
            go(process)
        assert [process.wait(120) for process in both] == [0, 0]
        assert set(check(location)) == {1, 2}, "both wrote; else the test shows nothing"
    finally:
        if server:
            server.kill()
    assert not list(tmp_path.rglob(".*.tmp"))


def forked(work):
    """The process id of a child that does this."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_killed_at_any_moment_a_writer_leaves_whole_shards(tmp_path):
    write(tmp_path / "undisturbed", 1)
    wanted, rng, killed = contents(tmp_path / "undisturbed"), random.Random(0), 0
    store = tmp_path / "store"
    while True:
        child = forked(lambda: write(store, 1, pause=0.002))
        time.sleep(0.01 + 0.02 * killed * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        shards = [p for p in store.glob("shard-*")] if store.exists() else []
        for path in shards:
            assert path.read_bytes() == wanted[path.name]
        if len(shards) == SHARDS:
            break
        assert killed < 300
    assert killed >= 3
    write(store, 1)
    assert contents(store) == wanted, "and nothing is left aside"


def test_a_full_disk_is_one_message_and_leaves_whole_shards(tmp_path):
    write(tmp_path / "undisturbed", 1)
    wanted, store = contents(tmp_path / "undisturbed"), tmp_path / "store"
    size = len(wanted["shard-000000.safetensors"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (size - 1, size // 2, 4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(UserError, match="a full disk"):
                write(store, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert set(contents(store)) <= {"manifest.json"}
    write(store, 1)
    assert contents(store) == wanted


def test_a_beginner_leaves_what_another_process_writes_now(tmp_path):
    path, ready = tmp_path / "x", tmp_path / "ready"

    def slowly(temporary):
        temporary.write_bytes(b"half")
        ready.touch()
        time.sleep(1)
        with open(temporary, "ab") as file:
            file.write(b"whole")

    child = forked(lambda: write_atomic(path, slowly))
    while not ready.exists():
        time.sleep(0.01)
    remove_leftovers(tmp_path)
    os.waitpid(child, 0)
    assert path.read_bytes() == b"halfwhole"
    ready.unlink()
    child = forked(lambda: write_atomic(path, slowly))
    while not ready.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ready", "x"]


def test_of_two_configurations_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    """Both have found the folder empty."""
    manifest.begin(tmp_path, "x/1", inputs(seed=1), remake=False)
    monkeypatch.setattr(places.Folder, "names", lambda self: [])
    kept, first = manifest.read, [True]

    def empty_at_first(folder):
        return None if first.pop() else kept(folder)

    first[:] = [False, True]
    monkeypatch.setattr(manifest, "read", empty_at_first)
    with pytest.raises(UserError, match=r"began at the same time.*seed was 1, is now 2"):
        manifest.begin(tmp_path, "x/1", inputs(seed=2), remake=False)
