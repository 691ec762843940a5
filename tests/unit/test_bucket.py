"""A store on S3: real server processes, which are also killed, busy, and strict about signatures."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch

import s3_servers
from draftsmith import bucket, places
from draftsmith.core import Damaged, UserError
from draftsmith.features import StoreSource, epoch_plan
from draftsmith.store.reader import StoreReader
from s3_servers import BUCKET
from stores import features, inputs, write_store

WHERE = f"s3://{BUCKET}/runs/a"


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
    rows = epoch_plan(local.lengths, budget=40, seed=0, epoch=0).rows
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


@pytest.mark.parametrize("how", ["503", "cut", "slow"])
def test_a_busy_broken_or_slow_server_is_asked_again(moto, monkeypatch, small_parts, how):
    busy = s3_servers.Busy(moto.url, how)
    try:
        s3_servers.use(monkeypatch, busy.url)
        made = features([6, 7])
        write_store(f"{WHERE}/{how}", made, inputs())
        assert torch.equal(StoreReader(f"{WHERE}/{how}").read(99)["hidden"], made[1].hidden)
        place, data = places.at(f"{WHERE}/{how}"), os.urandom(11 << 20)
        place.put_new("large", [memoryview(data)])
        assert place.read("large") == data
        assert how == "slow" or busy.refused > busy.served > 5
    finally:
        busy.close()


@pytest.fixture
def small_parts(monkeypatch):
    """Objects above 10 MiB go in parts of 5 MiB, S3's least."""
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(bucket, "LARGE_BYTES", 10 << 20)


def test_of_two_writers_of_a_large_object_the_first_keeps_it(moto, monkeypatch, small_parts):
    s3_servers.use(monkeypatch, moto.url)
    place = places.at(f"{WHERE}/large")
    first, second = ([memoryview(bytes([n]) * (6 << 20))] * 2 for n in (1, 2))
    place.put_new("x", first)
    monkeypatch.setattr(bucket.Bucket, "_exists", lambda self, name: False)  # both began at once
    place.put_new("x", second)
    assert place.read("x") == b"".join(first)
    assert list(place._listed()) == ["x"], "nothing is left aside"
    out = bytearray(12 << 20)
    place.read_into("x", 0, memoryview(out))
    assert out == b"".join(first)


def test_a_server_killed_while_a_large_object_goes_up(tmp_path, monkeypatch, small_parts):
    server = s3_servers.localbucket(tmp_path)
    s3_servers.use(monkeypatch, server.url)
    place, data = places.at(WHERE), os.urandom(40 << 20)

    def kill_and_start():
        for pause in (0.1, 0.4, 0.7):
            time.sleep(pause)
            server.kill()
            time.sleep(0.2)
            server.start()

    trouble = threading.Thread(target=kill_and_start)
    trouble.start()
    try:
        place.put_new("x", [memoryview(data)])
        trouble.join()
        assert place.read("x") == data and place.names() == ["x"]
    finally:
        trouble.join()
        server.kill()


def test_an_upload_of_which_the_server_lost_a_part_is_begun_again(
    tmp_path, monkeypatch, small_parts
):
    """As one does that was killed before a part was on its disk."""
    server = s3_servers.localbucket(tmp_path)
    s3_servers.use(monkeypatch, server.url)
    data, lost, stop = os.urandom(20 << 20), [], threading.Event()

    def lose_one():
        while not lost and not stop.is_set():
            for part in tmp_path.glob(".localbucket-uploads/*/00001"):
                part.unlink()
                lost.append(part)

    thief = threading.Thread(target=lose_one)
    thief.start()
    place = places.at(f"{WHERE}/lost")
    place.put_new("x", [memoryview(data)])
    stop.set()
    thief.join()
    assert lost and place.read("x") == data
    server.kill()


def test_what_dead_writers_put_aside_is_hidden_and_goes_after_a_day(moto, monkeypatch):
    s3_servers.use(monkeypatch, moto.url)
    place = places.at(f"{WHERE}/left")
    for name in ("x", ".x.0123.tmp"):
        place.replace(name, b"1")
    place.remove_leftovers()
    assert place.names() == ["x"] and len(place._listed()) == 2, "it may be another writer's"
    monkeypatch.setattr(bucket, "LEFT_AFTER", timedelta(0))
    place.remove_leftovers()
    assert list(place._listed()) == ["x"]


def test_a_server_that_cannot_copy_in_parts_is_one_message(tmp_path, monkeypatch, small_parts):
    server = s3_servers.nanio(tmp_path)
    try:
        s3_servers.use(monkeypatch, server.url)
        with pytest.raises(UserError, match=r"UploadPartCopy.*Lower extract\.shard_bytes"):
            places.at(WHERE).put_new("x", [memoryview(bytes(11 << 20))])
    finally:
        server.kill()


def test_a_server_that_stays_away_is_one_message(monkeypatch):
    s3_servers.use(monkeypatch, f"http://127.0.0.1:{s3_servers.free_port()}", patience_s=1)
    for attempt in (lambda p: p.names(), lambda p: p.put_new("x", [memoryview(b"x")])):
        with pytest.raises(UserError, match=r"no usable answer.*AWS_ENDPOINT_URL"):
            attempt(places.at(WHERE))
