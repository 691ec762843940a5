"""The disk's rates are the disk's: synced when written, and not in memory when read."""

import json
import os
from pathlib import Path

import pytest

from draftsmith.bench import store as bench_store
from draftsmith.bench.store import cached, drop_cache
from draftsmith.cli import main
from draftsmith.core import UserError


def share(path):
    with open(path, "r+b") as file:
        return cached(file.fileno(), path.stat().st_size)


def test_reads_are_cold(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3_000_000))
    os.sync()
    path.read_bytes()
    assert share(path) == 1.0
    drop_cache(tmp_path)
    assert share(path) == 0.0
    path.read_bytes()
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)
    with pytest.raises(UserError, match="100% of the file still in memory"):
        drop_cache(tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_a_file_system_in_memory_is_no_disk(capsys, monkeypatch):
    monkeypatch.setattr(bench_store, "SHARD_BYTES", 1 << 20)
    args = ["bench", "store", "--folder", "/dev/shm", "--bytes", "2000000", "--hidden", "64"]
    assert main(args) == 2
    assert "still in memory" in capsys.readouterr().err
    assert not list(Path("/dev/shm").glob("bench-store-*"))


def test_every_codec_is_measured_and_the_rates_are_kept_for_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_store, "SHARD_BYTES", 1 << 20)
    synced = []
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), original(fd)))
    rates = tmp_path / "rates.json"
    rates.write_text('{"matmul_tflops": 300}')
    args = ["bench", "store", "--folder", tmp_path / "here", "--bytes", 2_500_000, "--hidden", 64,
            "--repeats", 2, "--rates", rates, "--json"]  # fmt: skip
    assert main([str(arg) for arg in args]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in said["codecs"]] == ["none", "lossless", "fp8"]
    none, lossless, fp8 = (row["size"] for row in said["codecs"])
    assert 1.0 <= none < 1.1 and fp8 < 0.6 and lossless < none
    for row in said["codecs"]:
        low, high = row["read_mb_s_range"]
        assert 0 < low <= row["read_mb_s"] <= high
    assert len(synced) > 2 * (2 + 3 * 3), "every plain file and every shard"
    kept = json.loads(rates.read_text())
    assert kept["matmul_tflops"] == 300 and kept["disk_read_mb_s"] == said["disk_read_mb_s"]
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("kind", ["store", "extract", "train"])
def test_a_folder_that_cannot_be_written_is_one_message(kind, capsys):
    assert main(["bench", kind, "--folder", "/proc/nothing"]) == 2
    assert "--folder /proc/nothing: found no place to write" in capsys.readouterr().err
