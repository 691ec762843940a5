"""`bench decode` on a tiny configuration: what it measures, what it computes from it, what it refuses."""

import json

import pytest
from test_bad_input import refused

from draftsmith.bench.curves import CURVES, even
from draftsmith.bench.decode import speedups
from draftsmith.cli import main
from tiny_models import CONFIGS


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_5"]().to_dict()))
    return path


def bench(*args: object) -> list[str]:
    words = [
        "--context",
        "40",
        "--block-size",
        "6",
        "--tree-nodes",
        "12",
        "--layers",
        "1",
        "--rounds",
        "2",
    ]
    return [str(a) for a in ("bench", "decode", *words, *args)]


def test_it_measures_the_loops_own_steps(model, capsys):
    own = ["--survival", "0.9", "0.5", "0.1", "--tree-tau", "1.01"]
    assert main(bench("--model", model, *own, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("ar", "draft", "chain_verify", "tree_verify", "chain_commit", "weights_once"):
        assert result[name + "_s"] > 0
    mine = result["speedups"][0]
    assert mine["curve"] == "yours" and mine["chain_tau"] == pytest.approx(2.5)
    assert mine["tree_speedup"] < mine["chain_speedup"], "a tree that is accepted less"
    assert 0 < result["chain_commit_share"] < 1 and len(result["speedups"]) == len(CURVES) + 1
    assert main(bench("--model", model)) == 0
    said = capsys.readouterr().out
    assert "a tree wins above tau" in said and "tree-loses" in said


def test_speedups_are_tau_times_a_step_over_a_round():
    times = {"ar": 10.0, "ar_commit": 0.0, "draft": 1.0, "extend": 1.0, "chain_verify": 12.0,
             "chain_commit": 1.0, "tree_verify": 16.0, "tree_commit": 1.0}  # fmt: skip
    by_name = {s["curve"]: s for s in (speedups(curve, times, 16) for curve in CURVES)}
    assert by_name["gsm8k"]["chain_speedup"] == pytest.approx(7.32 * 10 / 15, rel=1e-3)
    assert by_name["gsm8k"]["tree_must_reach_tau"] == pytest.approx(7.32 * 19 / 15, rel=1e-3)
    assert by_name["tree-loses"]["tree_speedup"] < by_name["tree-loses"]["chain_speedup"]
    assert by_name["qwen3-8b-b8"]["chain_tau"] == pytest.approx(3.16, abs=0.01)
    assert 1 + sum(even(4.83)) == pytest.approx(4.83)


def test_what_makes_no_sense_is_refused(model, capsys):
    for words, said in (
        (["--survival", "0.5", "0.6"], "never rise"),
        (["--survival"], "--survival"),
        (["--tree-nodes", "3"], "a tree no smaller"),
        (["--context", "40000000"], "Lower --context"),
        (["--block-size", "1"], "2 or more"),
    ):
        assert said in refused(capsys, *bench("--model", model, *words))
    assert "--model" in refused(capsys, *bench("--model", "no/such-model"))
