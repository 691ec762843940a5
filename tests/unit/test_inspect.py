"""inspect: the marked sample in the terminal and as a page, the summary and its picture."""

import json
from pathlib import Path

import pytest
from runs import write_config

from draftsmith import tables
from draftsmith import tokenize as tokenize_stage
from draftsmith.cli import main
from draftsmith.configfile import load


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = write_config(tmp_path, regenerate={"enabled": False})
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {i} <b>"},
                {"role": "assistant", "content": f"answer \u4e2d {i} <i>"},
            ],
            "source": "a" if i % 3 else "b",
        }
        for i in range(30)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["prepare", str(path)]) == 0 and main(["tokenize", str(path)]) == 0
    return tmp_path / "run"


def test_a_sample_is_shown_with_its_supervised_tokens(run, capsys):
    capsys.readouterr()
    page = run.parent / "page.html"
    assert main(["inspect", str(run), "--sample", "3", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "question" in said and "answer \u4e2d" in said and "supervised" in said
    text = page.read_text()
    assert '<span class="s">answer \u4e2d' in text and "&lt;i&gt;" in text and "<i>" not in text
    cfg = load(run.parent / "config.yaml")
    rows = list(tables.read_rows(tokenize_stage.folder(cfg), tokenize_stage.finished(cfg)))
    assert main(["inspect", str(run / "data" / "tokens"), "--sample", "3", "--ids"]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert all(f"[{i}]" in said for i in rows[3]["input_ids"])


def test_the_summary_counts_every_token(run, capsys):
    capsys.readouterr()
    picture, page = run.parent / "p.png", run.parent / "s.html"
    assert main(["inspect", str(run), "--picture", str(picture), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    counts = json.loads((run / "data/tokens/manifest.json").read_text())["counts"]
    share = f"{100 * counts['supervised_tokens'] / counts['tokens']:.1f}%"
    assert share in said and f"{counts['tokens']:,}" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in page.read_text()


def test_what_cannot_be_shown(run, capsys, tmp_path):
    assert main(["inspect", str(run), "--sample", "99"]) == 2
    assert "0 to 29" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--ids"],
        ["--sample", "0", "--picture", "p.png"],
        ["--picture", "p.xyz"],
        ["--html", "."],
        ["--html", "prompts.jsonl/page.html"],
    ],
)
def test_options_that_lead_nowhere(run, capsys, monkeypatch, options):
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.iterdir())
    capsys.readouterr()
    assert main(["inspect", str(run), *options]) == 2
    said = capsys.readouterr().err
    assert "expected" in said and "Traceback" not in said
    assert sorted(run.parent.iterdir()) == before
