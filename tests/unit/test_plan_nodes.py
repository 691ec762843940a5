"""plan --nodes: what more GPUs bring, against sums made by hand."""

import contextlib
import io
import json
from functools import cache
from pathlib import Path

import pytest

from draftsmith.cli import main

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3.6-27b.yaml"


@cache
def plan(*more: str) -> dict:
    """The reference workload on H200s, eight a node."""
    out, given = (
        io.StringIO(),
        ["--samples", "913K", "--tokens", "913M", "--gpus", "8", "--gpu-memory", "141GB"],
    )
    with contextlib.redirect_stdout(out):
        words = [
            "plan",
            str(RECIPE),
            "--target",
            "qwen3.6-27b",
            *given,
            "--disk",
            "1.9TB",
            "--json",
            *more,
        ]
        assert main(words) == 0
    return json.loads(out.getvalue())


def lines(*more: str) -> dict[int, dict]:
    """The table, by GPUs."""
    return {line["gpus"]: line for line in plan(*more)["scaling"]}


def test_powers_of_two_up_to_all_nodes():
    found = lines("--nodes", "3")
    assert [(line["nodes"], gpus) for gpus, line in found.items()] == [
        (1, 1), (1, 2), (1, 4), (1, 8), (2, 16), (3, 24)
    ]  # fmt: skip
    assert plan()["scaling"] == []


def test_ranks_share_a_steps_rows():
    """A sample of 1,000 tokens has 499 anchors, so that a row of 512 blocks holds one: 32 rows a step."""
    found = lines("--nodes", "8")
    assert found[16]["train"]["decides"] == "matrix products"
    assert found[64]["train"]["decides"] == "32 rows a step"
    assert found[64]["train"]["hours"] >= found[32]["train"]["hours"]
    assert 7.9 < found[1]["train"]["hours"] / found[8]["train"]["hours"] <= 8
    three = lines("--nodes", "3")  # 24 ranks take 32 rows in two rounds, as 16 do
    assert three[24]["train"]["hours"] == pytest.approx(three[16]["train"]["hours"], rel=0.1)
    more = lines("--nodes", "8", "--train.tokens_per_step", "128000")
    assert more[64]["speedup"] > 1.5 * found[64]["speedup"]  # 128 rows


def test_a_slow_network_decides(tmp_path):
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"network_gb_s": 1.25}))  # 10 Gbit/s
    slow = lines("--nodes", "2", "--rates", str(rates))
    assert slow[16]["train"]["decides"] == "messages between nodes"
    params, steps = plan("--nodes", "2")["drafter"]["params"], 6 * 913e6 / 32000
    talk_h = 2 * (1 / 2) * 4 * params / 1.25e9 * steps / 3600
    assert slow[16]["train"]["hours"] == pytest.approx(
        talk_h + slow[1]["train"]["hours"] / 16, rel=0.1
    )


def test_one_stores_writing_bounds_extraction(tmp_path):
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"disk_write_mb_s": 4000, "disk_read_mb_s": 20000}))
    found = lines("--nodes", "8", "--rates", str(rates), "--features.source", "store")
    stored_h = plan()["store"]["bytes"]["none"] / 4e9 / 3600
    assert found[64]["extract"]["decides"] == "the store's writing"
    assert found[64]["extract"]["hours"] == pytest.approx(stored_h)
    assert found[1]["extract"]["decides"] == "matrix products"


def test_the_price_of_all_gpus_for_all_hours():
    found = plan("--nodes", "2", "--price", "2.5")
    assert found["cost"] == pytest.approx(found["hours"] * 16 * 2.5)
    line = found["scaling"][-1]
    assert line["cost"] == pytest.approx(line["gpu_hours"] * 2.5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "2"], "--nodes: found no --gpus"),
        (["--nodes", "0", "--gpus", "8"], "0 is none"),
        (["--price", "free"], "no price such as 2.5"),
    ],
)
def test_wrong_use(capsys, words, told):
    try:
        code = main(
            [
                "plan",
                str(RECIPE),
                "--samples",
                "1K",
                "--tokens",
                "1M",
                "--target",
                "qwen3.6-27b",
                *words,
            ]
        )
    except SystemExit as end:  # argparse's own
        code = end.code
    assert code == 2 and told in capsys.readouterr().err
