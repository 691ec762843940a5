"""All stages on the real built-in target, in processes of their own: complete, resumable, skipped when done."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from runs import command, contents, environment, kill_when, write_config
from safetensors.torch import load_file

from draftsmith.store.reader import StoreReader

STAGES = ["prepare", "regenerate", "tokenize", "extract", "train", "evaluate", "export"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """An undisturbed run; its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = command("run", write_config(folder), fresh=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_run_is_complete_and_its_files_are_as_documented(finished):
    run = finished / "run"
    state = json.loads((run / "state.json").read_text())
    assert (state["state"], state["stage"]) == ("DONE", "export")
    keys = "run stage state done total unit rate eta_s started_at heartbeat_at workers gpus last failure"
    assert set(keys.split()) <= set(state)
    manifest = json.loads((run / "features" / "manifest.json").read_text())
    assert manifest["complete"] and len(manifest["files"]) >= 3
    assert (
        manifest["inputs"]["taps"] == [1, 3, 5]
        and "hidden_states[i+1]" in manifest["inputs"]["convention"]
    )
    shard = load_file(run / "features" / "shard-000000.safetensors")
    N, S = len(shard["input_ids"]), len(shard["sample_ids"])
    assert shard["hidden"].shape == (N, 3, 256) and shard["hidden"].dtype == torch.bfloat16
    assert (
        shard["loss_mask"].shape == (N,)
        and shard["offsets"].shape == (S + 1,)
        and shard["offsets"][-1] == N
    )
    report = json.loads((run / "eval" / "report.json").read_text())
    suite = report["suites"][0]
    for name in ("ar", "lookup", "chain", "tree", "untrained", "shuffled"):
        entry = suite["methods"][name]
        wanted = "tau_pooled tau_mean tau_ci95 survival histogram target_calls_per_token tokens_per_s speedup"
        assert set(f"{wanted} identical mismatches near_ties".split()) <= set(entry)
        assert (
            entry["mismatches"] == 0
            and entry["identical"] + entry["near_ties"] == suite["num_prompts"]
        )
    assert suite["methods"]["ar"]["tau_pooled"] == 1.0
    page = (run / "eval" / "report.html").read_text()
    assert page.count("<svg") >= 5 and "http://" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", "").replace("http://creativecommons.org", "")  # fmt: skip
    assert {p.name for p in (run / "export").iterdir()} == {
        "config.json", "model.safetensors", "README.md",
    }  # fmt: skip
    assert len(load_file(run / "export" / "model.safetensors")) == 11 * 2 + 3
    for path in run.rglob("*.safetensors"):
        assert path.stat().st_mode & 0o044 == 0o044, "servers of other users read it"
    assert (run / "run.yaml").exists()


def test_replay_along_the_text_equals_the_live_loop(finished):
    """tau without a decode loop, round for round, on a drafter that is accepted now and then."""
    from draftsmith import configfile, evaluate, train
    from draftsmith.core import Sample
    from draftsmith.decode import methods
    from draftsmith.decode.replay import replay
    from draftsmith.drafter.checkpoint import load_drafter
    from draftsmith.target.load import load_target, unembed
    from draftsmith.train import checkpoints

    cfg = configfile.load(finished / "config.yaml")
    target = load_target(cfg.target)
    drafter = load_drafter(
        checkpoints.checkpoints(train.folder(cfg))[-1], round_to=torch.bfloat16
    ).share(*unembed(target))
    prompts = json.loads((finished / "run" / "eval" / evaluate.TRACES).read_text())
    accepted = 0
    for prompt in prompts:
        chain = prompt["methods"]["chain"]
        sample = Sample(0, prompt["prompt_ids"] + chain["tokens"], [])
        features = methods.features_of(target, list(drafter.shape.taps), sample.input_ids)
        ran = replay(drafter, sample.input_ids, len(prompt["prompt_ids"]), features)
        assert ran.emitted == chain["emitted"]
        accepted += sum(chain["accepted"])
    assert accepted, "a drafter that is never accepted would prove nothing"


def test_a_second_run_skips_everything_and_changes_nothing(finished):
    before = contents(finished / "run" / "features") | contents(finished / "run" / "checkpoints")
    again = command("run", finished / "config.yaml")
    assert again.returncode == 0 and again.stdout.count("already complete") == len(STAGES)
    assert (
        contents(finished / "run" / "features") | contents(finished / "run" / "checkpoints")
        == before
    )
    status = command("status", finished / "run")
    assert status.returncode == 0 and status.stdout.startswith("DONE")


def test_killed_in_every_stage_the_run_ends_with_the_same_bytes(finished, tmp_path):
    config, run = write_config(tmp_path), tmp_path / "run"
    kill_when(
        ["run", config],
        run,
        "regenerate",
        lambda r: len(list((r / "data/answers").glob("answers*"))) == 2,
    )
    status = command("status", run)
    assert status.returncode == 1 and "FAILED" in status.stdout and "died" in status.stdout
    kill_when(
        ["run", config], run, "extract", lambda r: len(list((r / "features").glob("shard*"))) == 2
    )
    kill_when(["run", config], run, "train", lambda r: (r / "checkpoints/step-6").exists())
    kill_when(
        ["run", config],
        run,
        "evaluate",
        lambda r: json.loads((r / "state.json").read_text())["done"] > 0,
    )
    answered = (run / "eval" / "kept.jsonl").read_bytes()
    assert answered.count(b"\n") >= 1, "a prompt's answers are kept as soon as they are there"
    with open(run / "eval" / "kept.jsonl", "ab") as file:
        file.write(b'{"ar": {"tok')  # killed in the middle of a line
    kept = (run / "features" / "shard-000000.safetensors").stat().st_mtime_ns
    done = command("run", config)
    assert done.returncode == 0, done.stderr
    assert (run / "features" / "shard-000000.safetensors").stat().st_mtime_ns == kept, (
        "finished shards are kept"
    )
    for part in ("data/answers", "data/tokens", "features", "checkpoints", "export"):
        one, two = contents(finished / "run" / part), contents(run / part)
        assert set(one) == set(two)
        for name in one:
            assert one[name] == two[name], f"{part}/{name}"
    reports = [
        json.loads((r / "eval/report.json").read_text())["suites"][0]["methods"]
        for r in (finished / "run", run)
    ]
    for name, entry in reports[0].items():
        assert entry["tau_pooled"] == reports[1][name]["tau_pooled"]
        assert entry["histogram"] == reports[1][name]["histogram"]
    losses = [
        {e["step"]: e["loss"] for e in events(r) if e["kind"] == "step"}
        for r in (finished / "run", run)
    ]
    assert losses[0] == losses[1], "the loss curve goes on bit for bit"
    assert not list(run.rglob("*.tmp")), "nothing half-written is left"
    assert not (run / "eval" / "kept.jsonl").exists()


def without_features(finished: Path, folder: Path) -> tuple[Path, Path]:
    """The finished run as it was before extraction, elsewhere: its configuration and folder."""
    run = folder / "run"
    for part in ("data/conversations", "data/answers", "data/tokens"):
        shutil.copytree(finished / "run" / part, run / part)
    config = yaml.safe_load((finished / "config.yaml").read_text())
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "run": str(run)}))
    return path, run


def test_several_workers_one_of_them_killed_leave_the_same_bytes(finished, tmp_path):
    config, run = without_features(finished, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", "extract", str(config), "--extract.workers", "2"],
        env=environment(),
    )  # fmt: skip
    deadline, killed = time.time() + 120, None
    while process.poll() is None and time.time() < deadline:
        if killed is None and list((run / "features").glob("shard*")):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            commands = {c: Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
            killed = next(int(c) for c, text in commands.items() if b"spawn_main" in text)
            os.kill(killed, signal.SIGKILL)
        time.sleep(0.005)
    assert process.wait(60) == 0 and killed is not None
    assert any(e["kind"] == "worker_lost" for e in events(run))
    one, two = contents(finished / "run/features"), contents(run / "features")
    assert one.keys() == two.keys()
    assert all(one[name] == two[name] for name in one if name.startswith("shard"))


def test_packed_rows_leave_the_same_states_and_later_stages_follow_the_store(finished, tmp_path):
    config, run = without_features(finished, tmp_path)
    done = command("extract", config, "--extract.rows", "packed")
    assert done.returncode == 0, done.stderr
    kinds = [e["kind"] for e in events(run)]
    assert kinds.index("loaded") < kinds.index("self_test") < kinds.index("shard")
    padded, packed = StoreReader(finished / "run/features"), StoreReader(run / "features")
    assert padded.sample_ids and set(padded.sample_ids) == set(packed.sample_ids)
    assert "packed" in packed.manifest["inputs"]["engine"]
    for i in padded.sample_ids:
        one, two = padded.read(i), packed.read(i)
        torch.testing.assert_close(
            two["hidden"].float(), one["hidden"].float(), rtol=2e-2, atol=2e-2
        )
        assert torch.equal(one["input_ids"], two["input_ids"])
    again = command("extract", config)
    assert again.returncode == 0 and "already complete" in again.stdout, "auto: as it was begun"
    other = command("extract", config, "--extract.rows", "padded")
    assert other.returncode == 2 and "engine was" in other.stderr


def test_changed_inputs_redo_cheap_stages_and_refuse_to_drop_expensive_ones(finished):
    config = finished / "config.yaml"
    again = command("run", config, "--evaluate.max_prompts", "2")
    assert again.returncode == 0
    done_again = ["evaluate", "export"]  # the model card holds evaluate's table
    assert again.stdout.count("already complete") == len(STAGES) - len(done_again)
    for key, value, what in (
        ("features.taps", "[1, 3, 4]", "taps was [1, 3, 5], is now [1, 3, 4]"),
        ("train.lr", "1.0e-3", "train.lr was"),
        ("regenerate.max_new_tokens", "9", "max_new_tokens was 24, is now 9"),
    ):
        refused = command("run", config, f"--{key}", value)
        assert refused.returncode == 2 and what in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
        state = json.loads((finished / "run/state.json").read_text())
        assert state["state"] == "DONE", "a refused command leaves a finished run's record alone"
    other = command("evaluate", config, "--features.taps", "[1, 3, 4]")
    assert other.returncode == 2 and "taps was [1, 3, 5]" in other.stderr
    other = command("evaluate", config, "--drafter.block_size", "8")
    assert other.returncode == 2 and "block_size was 4, is now 8" in other.stderr
    written = yaml.safe_load((finished / "run/run.yaml").read_text())
    assert written["train"]["lr"] == 6e-4, "a refused configuration is not written down"
    assert written["features"]["taps"] == "auto"
    (finished / "run/export/model.safetensors").unlink()
    assert command("export", config).returncode == 0
    assert (finished / "run/export/model.safetensors").exists(), (
        "an export without weights is remade"
    )


def test_text_that_differs_is_a_fault_each_time_it_is_asked_for(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    path = tmp_path / "run/eval/report.json"
    report = json.loads(path.read_text())
    report["suites"][0]["methods"]["chain"]["mismatches"] = 1
    path.write_text(json.dumps(report, indent=1) + "\n")
    asked = report["settings"]["max_prompts"]
    args = ["--run", tmp_path / "run", "--evaluate.max_prompts", asked]
    again = command("evaluate", finished / "config.yaml", *args)
    assert again.returncode == 1 and "beyond near ties: {'held_out chain': 1}" in again.stderr
    assert command("status", tmp_path / "run").returncode == 1


def events(run: Path) -> list[dict]:
    """events.jsonl."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
