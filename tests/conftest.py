"""Shared fixtures; and GPU tests skip where there is no GPU."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the models are tiny, a second thread only costs
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "e2e")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # not where workers are only told what to run

    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="module")
def moto():
    """An S3 server process."""
    import s3_servers

    server = s3_servers.moto()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the built-in target, done up to its features, for all workers. `runs.resume` copies it."""
    from runs import command, write_config

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "extracted"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "run").exists():
            config = write_config(folder)
            for stage in ("prepare", "regenerate", "tokenize", "extract"):
                done = command(stage, config)
                assert done.returncode == 0, done.stderr
    return folder / "run"
