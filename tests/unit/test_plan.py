"""The plan's numbers against others computed by hand, counted, or measured."""

import contextlib
import io
import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import OUTPUTS, resume, write_config

from draftsmith import configfile
from draftsmith.cli import main
from draftsmith.drafter.config import DrafterShape
from draftsmith.drafter.model import DFlash
from draftsmith.extract.plan import feature_bytes
from draftsmith.options import _amount
from draftsmith.plan.estimate import kept_bytes
from draftsmith.ranks import Ranks
from draftsmith.source import amount, choose_source
from draftsmith.train.checkpoints import Saver

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3.6-27b.yaml"
WORKLOAD = ["--samples", "913K", "--tokens", "913M", "--gpus", 8, "--gpu-memory", "96GB"]
H, INNER, VOCAB, TAPS = 5120, 17408, 248320, 5


def plan(capsys, *args):
    """Exit code and what `plan --json` printed."""
    capsys.readouterr()
    code = main(["plan", *map(str, args), "--json"])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, json.loads(said.out) if said.out else said.err


@pytest.fixture(scope="module")
def reference():
    """The plan of the reference workload."""
    out = io.StringIO()
    args = ["plan", RECIPE, "--target", "qwen3.6-27b", *WORKLOAD, "--disk", "1.9TB", "--json"]
    with contextlib.redirect_stdout(out):
        assert main([str(arg) for arg in args]) == 0
    return json.loads(out.getvalue())


def test_the_reference_workload_takes_live_and_says_why(reference):
    assert reference["store"]["bytes"] == {
        "none": 913_000_000 * (TAPS * H * 2 + 5),
        "lossless": 913_000_000 * (TAPS * H * 2 + 5) - round(0.3 * 913_000_000 * TAPS * H * 2),
        "fp8": 913_000_000 * (TAPS * (H + 4) + 5),
    }
    assert reference["source"]["source"] == "live"
    reason = reference["source"]["reason"]
    assert (
        "46.8 TB of features (codec none) do not fit the 1.5 TB that features.max_bytes allows"
        in reason
    )
    assert "nor would fp8, the smallest (23.4 TB)" in reason


def test_sizes_are_those_of_the_published_target(reference):
    """The arithmetic of reference cost models: 26.90 B parameters in all, the drafter's by hand."""
    conv, values = 2 * 2048 + 6144, 6144
    gdn = H * conv + H * values + 2 * H * 48 + values * H + conv * 4 + 48 * 2 + 128
    attention = H * 24 * 256 * 2 + 2 * H * 4 * 256 + 24 * 256 * H + 2 * 256
    layers = 48 * gdn + 16 * attention + 64 * (3 * H * INNER + 2 * H)
    assert reference["target"]["params"] == layers + 2 * VOCAB * H
    cut = 47 * gdn + 15 * attention + 62 * (3 * H * INNER + 2 * H) + VOCAB * H
    assert reference["target"]["params_for_features"] == cut
    mine = 5 * (2 * H * 4096 + 2 * H * 1024 + 3 * H * INNER + 2 * H + 2 * 128) + 5 * H * H + 2 * H
    assert reference["drafter"]["params"] == mine


def test_one_gpu_shares_with_nobody_and_a_small_disk_is_said(capsys):
    args = ["plan", str(RECIPE), "--target", "qwen3.6-27b", "--samples", "913K", "--tokens", "913M", "--gpus",
            "1", "--gpu-memory", "96GB", "--disk", "50GB"]  # fmt: skip
    assert main(args) == 0
    said = capsys.readouterr().out
    assert "needs 100 GB of a GPU's 96 GB: train.recompute: true and extract" in said
    assert "50 GB free there: they do not fit" in said
    small = ["40GB" if arg == "96GB" else arg for arg in args]
    assert main(small) == 0
    assert (
        "evaluate needs 59.5 GB of a GPU's 40 GB: GPUs with more, or target.gpus_per_replica"
        in (capsys.readouterr().out)
    )


def test_a_checkpoint_is_counted_as_it_is_written(tmp_path, reference):
    said = reference["checkpoints"]
    assert said["one"] == 12 * reference["drafter"]["params"] and said["bytes"] == 4 * said["one"]
    shape = DrafterShape(
        256,
        768,
        2,
        4,
        2,
        64,
        1e-6,
        1e4,
        4096,
        99,
        ("full_attention",) * 2,
        2048,
        8,
        1,
        (1, 2, 3),
        8,
    )
    drafter = DFlash(shape).init_weights(0)
    optimizer = torch.optim.AdamW(drafter.parameters())
    sum(p.sum() for p in drafter.parameters()).backward()
    optimizer.step()
    saver = Saver(tmp_path, Ranks(), keep=1)
    saver.save(drafter, optimizer, 1)
    saver.wait()
    written = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    params = sum(p.numel() for p in drafter.parameters())
    assert abs(written / (12 * params) - 1) < 0.05


def test_hours_follow_the_measured_rates(reference):
    stages = {stage["name"]: stage for stage in reference["stages"]}
    rate = 913e6 / 8 / 3600 / stages["extract"]["hours"]
    assert 12_100 < rate < 12_800, "an H200 was measured at 12.1k to 12.8k tokens/s"
    extra = stages["train (live)"]["hours"] - stages["train (store)"]["hours"]
    assert extra == pytest.approx(6 * stages["extract"]["hours"])
    weights = (reference["target"]["params"] + reference["drafter"]["params"]) * 2
    assert weights < stages["evaluate"]["memory_bytes"] < weights + 5e9
    live = stages["train (live)"]
    assert live["fits"] and not live["note"], "the recipe's settings are for these GPUs"
    taken = [name for name, stage in stages.items() if stage["taken"]]
    assert taken == ["regenerate", "train (live)", "evaluate"]


def test_named_settings_fit_and_given_rates_count(capsys, tmp_path):
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"extract_tokens_per_s": 5000, "disk_read_mb_s": 100}))
    args = [RECIPE, "--target", "qwen3.6-27b", *WORKLOAD, "--disk", "60TB", "--rates", rates]
    whole = [*args, "--train.recompute", "false", "--extract.tokens_per_batch", 16384]
    _, made = plan(capsys, *whole, "--train.parallel", "ddp")
    live = next(stage for stage in made["stages"] if stage["name"] == "train (live)")
    assert not live["fits"] and live["note"] == "train.parallel: fsdp fits"
    code, made = plan(capsys, *args, "--features.max_bytes", "60000000000000")
    stages = {stage["name"]: stage for stage in made["stages"]}
    assert code == 0 and stages["train (live)"]["fits"]
    assert made["source"]["source"] == "store"
    assert stages["extract"]["hours"] == pytest.approx(913e6 / 5000 / 8 / 3600)
    reading = 913e6 * (TAPS * H * 2 + 5) / 100e6 * 6 / 3600
    assert stages["train (store)"]["hours"] == pytest.approx(reading)
    assert made["rates"]["disk_read_mb_s"]["source"] == str(rates)


def test_the_choice_and_its_reasons():
    sizes = {"none": 1000, "lossless": 700, "fp8": 500}
    assert choose_source(sizes, "none", room_bytes=1000, place="x").source == "store"
    assert choose_source(sizes, "none", room_bytes=None, place="s3://b").source == "store"
    choice = choose_source(sizes, "none", room_bytes=600, place="x")
    assert choice.source == "live" and choice.reason.endswith("; extract.codec: fp8 (500 B) would")
    choice = choose_source(sizes, "fp8", room_bytes=10, place="x")
    assert choice.source == "live" and "nor would" in choice.reason
    assert [amount(n) for n in (999, 1e3, 1.234e9, 999.6e9, 46.75e12, 5e15)] == [
        "999 B", "1 kB", "1.23 GB", "1000 GB", "46.8 TB", "5000 TB"
    ]  # fmt: skip


def test_a_runs_own_data_is_counted(capsys, tmp_path, extracted):
    """Given counts, then conversations, then tokens; `auto` is logged and the store is what plan said."""
    empty = write_config(tmp_path)
    code, said = plan(capsys, empty, "--gpus", 0)
    assert code == 2 and "no prepared data" in said and "--samples 913K" in said
    path = resume(extracted, tmp_path, "prepare")
    code, made = plan(capsys, path, "--gpus", 0)
    assert made["source"]["source"] == "store" and "fit the" in made["source"]["reason"]
    assert code == 0 and made["work"]["samples"] == 40 and "tokenized now" in made["work"]["source"]
    for stage in ("regenerate", "tokenize"):
        shutil.copytree(extracted / OUTPUTS[stage], tmp_path / "run" / OUTPUTS[stage])
    assert main(["extract", str(path)]) == 0
    tokens = json.loads((tmp_path / "run" / "data" / "tokens" / "manifest.json").read_text())
    code, made = plan(capsys, path, "--gpus", 0)
    assert made["work"]["tokens"] == tokens["counts"]["tokens"]
    assert made["work"]["answer_tokens"] == tokens["counts"]["supervised_tokens"]
    assert made["source"]["source"] == "store"
    stored = sum(f.stat().st_size for f in (tmp_path / "run" / "features").glob("shard-*"))
    assert stored == pytest.approx(made["store"]["bytes"]["none"], rel=0.02)
    events = [json.loads(e) for e in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (logged,) = [e for e in events if e["kind"] == "source"]
    assert logged["source"] == "store" and "fit the" in logged["reason"]
    assert main(["plan", str(path), "--gpus", "0"]) == 0
    table = capsys.readouterr().out
    assert "train (live)" in table and "features.source: store because there is a complete" in table
    assert plan(capsys, path, "--gpus", 0, "--disk", 9)[1]["source"]["source"] == "store"


def test_auto_takes_live_and_says_why(capsys, tmp_path, monkeypatch, extracted):
    path = resume(extracted, tmp_path, "tokenize")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 1000))
    capsys.readouterr()
    assert main(["extract", str(path)]) == 0
    said = capsys.readouterr().out
    assert "features.source auto: live, because" in said and "do not fit the 1 kB free" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "a list"),
        ("{", "no rates"),
        ('{"extract": 1}', "unknown name 'extract'"),
        ('{"matmul_tflops": 0}', "matmul_tflops 0"),
        ('{"matmul_tflops": true}', "matmul_tflops True"),
    ],
)
def test_broken_rates_are_refused(capsys, tmp_path, text, words):
    (tmp_path / "rates.json").write_text(text)
    path = write_config(tmp_path)
    args = ["--samples", 9, "--tokens", 90, "--gpus", 0, "--rates", tmp_path / "rates.json"]
    code, said = plan(capsys, path, *args)
    assert code == 2 and words in said and "matmul_tflops" in said


def test_wrong_use(capsys, tmp_path):
    path = write_config(tmp_path)
    assert (
        "unit"
        in plan(capsys, path, "--samples", 9, "--tokens", 90, "--gpus", 1, "--gpu-memory", 96)[1]
    )
    assert "at least a token" in plan(capsys, path, "--samples", 9, "--tokens", 5, "--gpus", 0)[1]
    assert plan(capsys, path, "--samples", 9, "--tokens", 90, "--gpus", 2)[0] == 2
    assert "no prepared data" in plan(capsys, path, "--samples", 9)[1]
    assert plan(capsys, path, path)[0] == 2
    with pytest.raises(SystemExit) as error:
        main(["plan", str(path), "--disk", "much"])
    assert error.value.code == 2
    assert [_amount(t) for t in ("913K", "1.9TB", "96 GB", "1e3", "7")] == [
        913_000, 1_900_000_000_000, 96_000_000_000, 1000, 7
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv", "inner", "layers", "context", "anchors", "block"),
    [(4, 2, 768, 1, 64, 16, 8), (4, 2, 768, 3, 64, 16, 8), (8, 1, 512, 2, 300, 4, 16)],
)
def test_what_training_keeps_is_what_autograd_keeps(
    heads, kv, inner, layers, context, anchors, block
):
    """The formula against the bytes that a real forward under autocast saves for its backward."""
    shape = DrafterShape(256, inner, layers, heads, kv, 64, 1e-6, 1e4, 4096, 99,
                         ("full_attention",) * layers, 2048, block, 1, (1, 2, 3), 8)  # fmt: skip
    slots = anchors * block
    drafter = DFlash(shape).init_weights(0)
    noise, states = (
        torch.randn(1, slots, 256).bfloat16(),
        torch.randn(1, context, 3, 256).bfloat16(),
    )
    kept: dict[int, torch.Tensor] = {}
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: _keep(kept, t), lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        drafter(noise, torch.arange(slots)[None], states,
                torch.arange(context)[None], {"full_attention": None})  # fmt: skip
    apart = [states, *drafter.parameters()]
    known = {t.untyped_storage().data_ptr() for t in apart}
    total = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)
    cast = [p for p in drafter.layers.parameters() if p.ndim == 2]  # fc's input needs no gradient
    weights = 2 * sum(p.numel() for p in cast)
    assert kept_bytes(shape, context, slots) == pytest.approx(total - weights, rel=0.05)


def _keep(kept, tensor):
    kept[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def test_every_codec_is_counted_as_extraction_writes_it(tmp_path):
    """feature_bytes against token_bytes by hand: 3 taps of 8 values in bf16, and what final adds."""
    info = SimpleNamespace(hidden_size=8)
    cfg = configfile.load(write_config(tmp_path, features={"final": "state"}))
    assert feature_bytes(cfg, info, 3, 10) == {
        "none": 10 * (3 * 16 + 16 + 5),
        "lossless": 10 * (3 * 16 + 16 + 5) - round(0.3 * 10 * 48),
        "fp8": 10 * (3 * 12 + 16 + 5),
    }
