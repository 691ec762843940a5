"""A store on S3: real server processes, which are also killed, busy, and strict about signatures."""

import threading
import time

import pytest
import torch

import s3_servers
from draftsmith import places
from draftsmith.core import Damaged, UserError
from draftsmith.features import StoreSource
from draftsmith.store.reader import StoreReader
from s3_servers import BUCKET
from stores import features, inputs, write_store

WHERE = f"s3://{BUCKET}/runs/a"


@pytest.fixture(scope="module")
def moto():
    server = s3_servers.moto()
    yield server
    server.kill()


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_a_store_on_s3_is_the_local_store(moto, monkeypatch, tmp_path, codec):
    s3_servers.use(monkeypatch, moto.url)
    made = features([5, 1, 17, 8, 30])
    here = write_store(tmp_path, made, inputs(codec=codec))
    there = write_store(f"{WHERE}/{codec}", made, inputs(codec=codec))
    assert here == there
    bucket = places.at(f"{WHERE}/{codec}")
    assert bucket.names() == sorted(p.name for p in tmp_path.iterdir())
    for name in bucket.names():
        assert bucket.read(name) == (tmp_path / name).read_bytes()
    local, remote = (StoreSource(p, list(range(96, 101))) for p in (tmp_path, bucket))
    rows = local.plan(tokens_per_batch=40, seed=0, epoch=0).rows
    both = zip(local.batches(rows, pinned=False), remote.batches(rows, pinned=False), strict=True)
    for one, two in both:
        assert one.sample_ids == two.sample_ids and torch.equal(one.hidden, two.hidden)
        assert torch.equal(one.input_ids, two.input_ids)


def test_of_two_writers_the_first_keeps_its_shard(moto, monkeypatch):
    s3_servers.use(monkeypatch, moto.url)
    place = places.at(f"{WHERE}/two")
    place.put_new("x", [memoryview(b"fir"), memoryview(b"st")])
    place.put_new("x", [memoryview(b"second")])
    assert place.read("x") == b"first"
    place.replace("x", b"third")
    assert place.read("x") == b"third" and place.sizes(["x", "y"]) == {"x": 5}
    assert place.read("y") is None
    with pytest.raises(Damaged, match="no such object"):
        place.read_ranges("y", [(0, 4)])
    with pytest.raises(UserError, match="two/x"):
        place.read_ranges("x", [(3, 9)])
    place.clear()
    assert place.names() == []


def test_no_such_bucket(moto, monkeypatch):
    s3_servers.use(monkeypatch, moto.url)
    for attempt in (lambda p: p.names(), lambda p: p.read("m"), lambda p: p.replace("m", b"x")):
        with pytest.raises(UserError, match=r"no such bucket \(nowhere\)"):
            attempt(places.at("s3://nowhere/x"))


def test_wrong_key_and_wrong_secret(tmp_path, monkeypatch):
    server = s3_servers.nanio(tmp_path)
    try:
        s3_servers.use(monkeypatch, server.url)
        write_store(WHERE, features([3, 4]), inputs())
        assert StoreReader(WHERE).length(99) == 4
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY"):
            StoreReader(WHERE)
        with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY"):
            places.at(WHERE).put_new("x", [memoryview(b"x")])
        s3_servers.use(monkeypatch, server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        with pytest.raises(UserError, match="AWS_ACCESS_KEY_ID"):
            StoreReader(WHERE)
    finally:
        server.kill()


def test_a_server_that_is_killed_and_comes_back_is_waited_for(tmp_path, monkeypatch):
    server = s3_servers.localbucket(tmp_path / "disk")
    s3_servers.use(monkeypatch, server.url)
    stored = tmp_path / "disk" / BUCKET / "runs" / "a"
    made = features([60] * 60)
    here = write_store(tmp_path / "local", made, inputs(), per_shard=2)

    stop = threading.Event()

    def kill_three_times():
        for shards in (2, 9, 20):
            while not (stored / f"shard-{shards:06d}.safetensors").exists():
                if stop.wait(0.001):
                    return
            server.kill()
            time.sleep(0.3)
            server.start()

    trouble = threading.Thread(target=kill_three_times, daemon=True)
    trouble.start()
    try:
        assert write_store(WHERE, made, inputs(), per_shard=2) == here
        trouble.join()
        reader = StoreReader(WHERE)
        server.kill()
        trouble = threading.Timer(0.3, server.start)
        trouble.start()
        for one in made:
            assert torch.equal(reader.read(one.sample.sample_id)["hidden"], one.hidden)
    finally:
        stop.set()
        trouble.join()
        server.kill()
    for path in (tmp_path / "local").iterdir():
        assert (stored / path.name).read_bytes() == path.read_bytes()


def test_a_busy_server_is_asked_again(moto, monkeypatch):
    busy = s3_servers.Busy(moto.url)
    try:
        s3_servers.use(monkeypatch, busy.url)
        made = features([6, 7])
        write_store(f"{WHERE}/busy", made, inputs())
        assert torch.equal(StoreReader(f"{WHERE}/busy").read(99)["hidden"], made[1].hidden)
        assert busy.refused > busy.served > 5
    finally:
        busy.close()


def test_a_server_that_stays_away_is_one_message(monkeypatch):
    s3_servers.use(monkeypatch, f"http://127.0.0.1:{s3_servers.free_port()}", patience_s=1)
    for attempt in (lambda p: p.names(), lambda p: p.put_new("x", [memoryview(b"x")])):
        with pytest.raises(UserError, match=r"no usable answer.*AWS_ENDPOINT_URL"):
            attempt(places.at(WHERE))
