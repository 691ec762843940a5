"""Two GPUs: a target that is split over them, workers of extraction, and ranks of training."""

import json
from pathlib import Path

import pytest
import torch
from runs import command, write_config

from draftsmith.config import TargetConfig
from draftsmith.core import Sample
from draftsmith.target.forward import StatesForward
from draftsmith.target.load import load_target
from tiny_models import assets, random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LENGTHS = (37, 64, 91, 5, 1, 130)


@pytest.mark.parametrize("row_tokens", [None, 512])
def test_a_replica_on_two_gpus_gives_the_states_of_one(row_tokens):
    samples = [Sample(i, random_ids(n, i), [1] * n) for i, n in enumerate(LENGTHS)]
    states = []
    for gpus in (1, 2):
        target = TargetConfig(
            model=str(assets() / "tiny-hybrid"), dtype="float32", device="cuda", gpus_per_replica=gpus
        )  # fmt: skip
        model = load_target(target)
        assert len({p.device for p in model.parameters()}) == gpus
        forward = StatesForward(model, [1, 3, 5], "none", torch.float32, row_tokens=row_tokens)
        states.append([one.hidden for one in forward(samples).features()])
    for alone, split in zip(*states, strict=True):
        assert ((alone - split).norm() / alone.norm()).item() < 5e-3


def test_two_workers_write_the_store_of_one(tmp_path):
    stores = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        path = write_config(folder, extract={"workers": workers}, regenerate={"enabled": False})
        gpu = ["--target.device", "cuda", "--target.dtype", "bfloat16"]
        for stage in ("prepare", "tokenize", "extract"):
            done = command(stage, path, *gpu, fresh=True)
            assert done.returncode == 0, done.stderr
        stores.append(json.loads((folder / "run" / "features" / "manifest.json").read_text()))
    assert stores[0]["entries"].keys() == stores[1]["entries"].keys()
    assert stores[0]["counts"] == stores[1]["counts"]


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("source", ["live", "store"])
def test_two_ranks_train_as_one(parallel, source, tmp_path):
    curves = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        train = {"processes": count, "parallel": parallel, "tokens_per_step": 1024, "max_steps": 8}
        features = {"source": source}
        path = write_config(folder, train=train, features=features, regenerate={"enabled": False})
        gpu = ["--target.device", "cuda", "--target.dtype", "bfloat16"]
        for stage in ("prepare", "tokenize", "extract", "train"):
            done = command(stage, path, *gpu, fresh=True)
            assert done.returncode == 0, done.stderr
        curves.append(losses(folder / "run"))
    assert len(curves[0]) == 8
    torch.testing.assert_close(curves[1], curves[0], rtol=0.02, atol=0)


def losses(run: Path) -> torch.Tensor:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return torch.tensor([event["loss"] for event in events if event["kind"] == "step"])
