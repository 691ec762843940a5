"""Extraction into S3 and training from it, in processes of their own, killed on the way."""

from runs import command, contents, kill_when, write_config

import s3_servers
from s3_servers import BUCKET


def test_killed_and_rerun_on_s3_it_is_the_undisturbed_local_store(tmp_path, monkeypatch):
    server = s3_servers.localbucket(tmp_path / "disk")
    s3_servers.use(monkeypatch, server.url)
    stored = tmp_path / "disk" / BUCKET / "a"
    config = write_config(
        tmp_path,
        prompts=24,
        extract={"codec": "lossless", "shard_bytes": 100_000},
        train={"max_steps": 4},
    )
    for stage in ("prepare", "regenerate", "tokenize", "extract", "train"):
        done = command(stage, config)
        assert done.returncode == 0, done.stderr
    remote = ["--features.store", f"s3://{BUCKET}/a"]
    try:
        for shards in (1, 3):
            seen = lambda run, n=shards: count(stored) >= n  # noqa: E731
            kill_when(["extract", config, *remote], tmp_path / "run", "extract", seen)
        done = command("extract", config, *remote)
        assert done.returncode == 0, done.stderr
        assert contents(stored) == contents(tmp_path / "run" / "features")
        checked = command("verify", remote[1], "--data", tmp_path / "run", "--recompute", 2)
        assert checked.returncode == 0 and "no faults" in checked.stdout, checked.stderr
        local = contents(tmp_path / "run" / "checkpoints" / "step-4")
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "local-checkpoints")
        done = command("train", config, *remote)
        assert done.returncode == 0, done.stderr
        assert contents(tmp_path / "run" / "checkpoints" / "step-4") == local
    finally:
        server.kill()


def count(folder):
    """Shards that a server shows."""
    return len(list(folder.glob("shard-*"))) if folder.exists() else 0
