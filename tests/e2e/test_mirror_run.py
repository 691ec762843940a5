"""A run and its mirror on a real S3 server, in processes of their own: stopped half-way, its machine
gone, it goes on from the mirror alone.
"""

import json
import re
import shutil

import pytest
from runs import command, contents, kill_when, write_config

import s3_servers
from s3_servers import BUCKET

MIRROR = f"s3://{BUCKET}/runs/a"
KEPT = ("data", "checkpoints", "eval", "export")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same configuration, run to its end without a mirror."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = command("run", config_in(folder))
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = s3_servers.localbucket(tmp_path / "disk")
    s3_servers.use(monkeypatch, server.url, patience_s=5)
    yield server
    server.kill()


def config_in(folder, **sections):
    """Long in training: a checkpoint must have reached the mirror while it goes on, on any machine."""
    folder.mkdir(exist_ok=True)
    return write_config(
        folder,
        prompts=24,
        train={"epochs": 8, "verdict_prompts": 1},
        evaluate={"methods": ["ar", "chain"], "max_prompts": 2, "max_new_tokens": 12},
        **sections,
    )


def same_results(run, other):
    """Every byte that does not hold a time."""
    for part in ("data", "features", "checkpoints", "export"):
        one, two = contents(run / part), contents(other / part)
        if part == "checkpoints":  # an older one that is the best so far is kept where it was made
            last = max(one, key=lambda name: int(re.findall("step-([0-9]+)|$", name)[0] or 0))
            one, two = (
                {k: v for k, v in x.items() if k.startswith((last.split("/")[0], "manifest"))}
                for x in (one, two)
            )
        assert set(one) == set(two), part
        for name in one:
            assert one[name] == two[name], f"{part}/{name}"


def stored(tmp_path):
    return tmp_path / "disk" / BUCKET / "runs" / "a"


def named(tmp_path):
    """The files that the catalogue names."""
    path = stored(tmp_path) / "mirror.json"
    units = json.loads(path.read_text())["units"] if path.exists() else {}
    return {path for unit in units.values() for path in unit["files"]}


def test_a_run_goes_on_from_its_mirror_alone(tmp_path, server, undisturbed):
    """Killed in regenerate, in train and before evaluate, each time with the folder lost; the prompts'
    file is gone too once it was read.
    """
    config, run = config_in(tmp_path / "a", mirror=MIRROR), tmp_path / "a" / "run"
    kill_when(
        ["run", config], run, "regenerate",
        lambda r: "data/answers/answers-00000.parquet" in named(tmp_path),
    )  # fmt: skip
    shutil.rmtree(run)
    (tmp_path / "a" / "prompts.jsonl").unlink()
    kill_when(
        ["run", config], run, "train",
        lambda r: any("step-" in name for name in named(tmp_path)),
    )  # fmt: skip
    assert "features" not in {path.name for path in stored(tmp_path).iterdir()}
    shutil.rmtree(run)
    done = command("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from s3://" in done.stdout and "already complete" in done.stdout
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    begun = [
        event["done"] for event in events if (event["stage"], event["kind"]) == ("train", "working")
    ]
    assert begun[-1] > 0, "training went on from a checkpoint"
    same_results(run, undisturbed)
    for name in named(tmp_path):
        assert (stored(tmp_path) / name).read_bytes() == (run / name).read_bytes(), name
    there, here = contents(stored(tmp_path)), contents(run)
    assert {name for name in here if name.split("/")[0] in KEPT} <= set(there)

    # A finished run on a third machine needs no features: nothing is extracted again.
    shutil.rmtree(run)
    done = command("run", config)
    assert done.returncode == 0, done.stderr
    assert "not needed" in done.stdout and not (run / "features").exists()
    assert command("status", run).returncode == 0
