"""Two GPUs: a target that is split over them, workers of extraction, and ranks of training."""

import json
from pathlib import Path

import pytest
import torch
from runs import command, resume, write_config

from draftsmith.config import TargetConfig
from draftsmith.core import Sample
from draftsmith.store.reader import StoreReader
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


TARGET = {"model": str(assets() / "tiny-hybrid"), "dtype": "bfloat16", "device": "cuda"}


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory) -> Path:
    """A run of 40 conversations, up to their tokens."""
    folder = tmp_path_factory.mktemp("tokenized")
    path = write_config(folder, target=TARGET)
    for stage in ("prepare", "regenerate", "tokenize"):
        succeed(stage, path)
    return folder / "run"


def succeed(stage: str, path: Path) -> None:
    done = command(stage, path, fresh=True)
    assert done.returncode == 0, done.stderr


def test_two_workers_write_the_store_of_one(tokenized, tmp_path):
    stores = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        cut = {"workers": workers, "shard_bytes": 100_000}
        succeed("extract", resume(tokenized, folder, "tokenize", target=TARGET, extract=cut))
        stores.append(StoreReader(folder / "run" / "features"))
    one, two = stores
    assert one.sample_ids == two.sample_ids and len(one.sample_ids) > 20
    assert len(one.manifest["files"]) > 5, "shards for both"
    assert one.manifest["files"].keys() == two.manifest["files"].keys()
    for sample_id in one.sample_ids:
        a, b = (store.read(sample_id)["hidden"].float() for store in stores)
        assert (a - b).norm() <= 0.02 * a.norm()


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("source", ["live", "store"])
def test_two_ranks_train_as_one(tokenized, parallel, source, tmp_path):
    """The same falling curve: a gradient that is not summed, or summed twice, is limited to another one."""
    curves = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        train = {
            "processes": count, "parallel": parallel, "tokens_per_step": 1024, "epochs": 6,
            "lr": 0.003, "anchors_per_sample": 8, "clip_norm": 1e9, "checkpoint_every": 100,
        }  # fmt: skip
        path = resume(
            tokenized, folder, "tokenize", target=TARGET, train=train, features={"source": source}
        )
        if source == "store":
            succeed("extract", path)
        succeed("train", path)
        curves.append(losses(folder / "run"))
    assert len(curves[0]) >= 12 and curves[0][-1] < 0.9 * curves[0][0]
    torch.testing.assert_close(curves[1], curves[0], rtol=0.02, atol=0)


def losses(run: Path) -> torch.Tensor:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return torch.tensor([event["loss"] for event in events if event["kind"] == "step"])
