"""Readers of every form and container, damaged files, cleaning, and the same output from one process
or several.
"""

import contextlib
import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from runs import contents, write_config

from draftsmith import prepare, tables
from draftsmith.cli import main
from draftsmith.configfile import load

CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}


def chat(question: str, answer: str = "yes", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def config(tmp_path: Path, *sources: dict[str, Any] | Path, **keys: Any) -> Path:
    listed = [s if isinstance(s, dict) else {"path": str(s)} for s in sources]
    section = {"sources": listed, **keys}
    return write_config(tmp_path, prepare=section, regenerate={"enabled": False})


def prepared(tmp_path: Path, *sources: dict[str, Any] | Path, **keys: Any) -> list[dict[str, Any]]:
    """The conversations, finished: messages with their answer."""
    path = config(tmp_path, *sources, **keys)
    assert main(["prepare", str(path)]) == 0
    cfg = load(path)
    rows = list(tables.read_rows(prepare.folder(cfg), prepare.finished(cfg)))
    for row in rows:
        row["messages"] = [*json.loads(row["messages"]), json.loads(row["answer"])]
        row["tools"] = json.loads(row["tools"]) if row["tools"] else None
    return rows


def counts(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run/data/conversations/manifest.json").read_text())["counts"]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(row: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(m["role"], m["content"]) for m in row["messages"]]


def test_each_container_gives_the_same_conversations(tmp_path):
    rows = [chat(f"question {i}", tools=[{"name": "f", "n": i}], id=i) for i in range(1200)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    plain = tmp_path / "a.jsonl"
    plain.write_text(text)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(text)
    with pa.output_stream(tmp_path / "c.jsonl.zst", compression="zstd") as file:
        file.write(text.encode())
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=1))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "e.parquet")
    with pa.ipc.new_stream(tmp_path / "f.arrow", table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.new_file(tmp_path / "g.arrow", table.schema) as stream:
        stream.write_table(table)
    found = {}
    for path in sorted(tmp_path.glob("?.*")):
        folder = tmp_path / f"run-{path.name}"
        folder.mkdir()
        kept = prepared(folder, {"path": str(path), "name": "s"})
        found[path.name] = [(r["origin"], r["messages"], r["tools"], r["split"]) for r in kept]
    assert len(found) == 7 and len(found["a.jsonl"]) == 1200
    for name, kept in found.items():
        assert kept == found["a.jsonl"], name


def test_two_zstd_frames_and_a_torn_one(tmp_path, capsys):
    rows = [chat(f"question {i}") for i in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    codec = pa.Codec("zstd")
    half = len(text) // 2
    frames = b"".join(codec.compress(part, asbytes=True) for part in (text[:half], text[half:]))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames)
    assert len(prepared(tmp_path, path)) == 20
    path.write_bytes(frames[:-10])
    capsys.readouterr()
    assert main(["prepare", str(config(tmp_path, path))]) == 2
    assert "damaged" in capsys.readouterr().err


def test_sharegpt_with_calls_and_alpaca(tmp_path):
    shared = {
        "system": "Be brief.",
        "tools": json.dumps([{"name": "f"}]),
        "conversations": [
            {"from": "human", "value": "go"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "done"},
            {"from": "gpt", "value": "It is done."},
        ],
    }
    one = {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["a", "b"]]}
    a, b = jsonl(tmp_path / "a.jsonl", [shared]), jsonl(tmp_path / "b.jsonl", [one])
    first, second = prepared(tmp_path, a, b, held_out=0)
    assert said(first) == [
        ("system", "Be brief."),
        ("user", "go"),
        ("assistant", None),
        ("tool", "done"),
        ("assistant", "It is done."),
    ]
    assert first["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert first["tools"] == [{"name": "f"}]
    assert said(second) == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Add.\n1 and 2"),
        ("assistant", "3"),
    ]
    text = (tmp_path / "run/data/conversations/summary.txt").read_text()
    assert "a.jsonl: sharegpt, guessed" in text and "b.jsonl: alpaca, guessed" in text


def test_agents_traces(tmp_path):
    steps = [
        {"role": "system", "content": "You fix bugs.", "agent": "main", "message_type": "system"},
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
        {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [CALL]},
        {"role": "tool", "content": "listing", "tool_call_id": "c1", "name": "bash"},
        {"role": "assistant", "content": "Fixed.", "action": "submit"},
        {"role": "user", "content": "a last observation"},
    ]
    old = [
        {"role": "system", "system_prompt": "You fix bugs.", "text": None},
        {"role": "user", "text": "Fix that."},
        {"role": "ai", "text": "Fixed."},
    ]
    rows = [
        {"instance_id": "x", "trajectory": steps, "tools": [{"name": "bash"}]},
        {"instance_id": "y", "trajectory": json.dumps(steps[:2] + steps[4:])},
        {"instance_id": "z", "trajectory": old},
    ]
    found = prepared(tmp_path, jsonl(tmp_path / "a.jsonl", rows), held_out=0)
    assert [len(row["messages"]) for row in found] == [5, 3, 3]
    assert found[0]["messages"][2]["reasoning_content"] == "look"
    assert found[0]["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert "agent" not in found[0]["messages"][0]
    assert said(found[2])[0] == ("system", "You fix bugs.")


def test_a_folder_of_the_datasets_library(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    rows = [chat(f"question {i}") for i in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "train-00000.parquet")
    found = prepared(tmp_path, {"path": f"hub:{tmp_path / 'set'}"})
    assert len(found) == 30 and {row["source"] for row in found} == {"set"}


def called(question: str, arguments: str) -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": None}]
    return json.dumps({"messages": [messages[0], {**messages[1], "tool_calls": [call]}]})


# The kinds of damage: a line of each, and the kind that the list of what was left out names.
DAMAGE: dict[str, tuple[Callable[[int], str | bytes], set[str]]] = {
    "broken JSON": (lambda i: '{"messages": [{"role": "user", "content": "cut', {"broken JSON"}),
    "missing role": (lambda i: json.dumps({"messages": [{"content": f"x {i}"}]}), {"role"}),
    "empty content": (lambda i: json.dumps(chat("  ")), {"empty content"}),
    "wrong type": (lambda i: json.dumps(chat(5 + i)), {"content"}),  # type: ignore[arg-type]
    "lone surrogate": (lambda i: json.dumps(chat(f"half \ud83d {i}")), {"lone surrogate"}),
    "surrogate in a call": (lambda i: called(f"s {i}", '{"x": "\\udc00"}'), {"lone surrogate"}),
    "1M characters": (lambda i: json.dumps(chat("long " * 200_000)), {"too long"}),
    "null": (
        lambda i: json.dumps({"messages": None, "n": i}) if i % 2 else "null",
        {"no messages"},
    ),
    "null content": (lambda i: json.dumps(chat(None)), {"content"}),  # type: ignore[arg-type]
    "not UTF-8": (lambda i: b"\xff\xfe" + str(i).encode(), {"encoding"}),
}
ODD: dict[str, Callable[[int], str]] = {
    "an id that an earlier record has": lambda i: json.dumps(chat(f"again {i}", id="same")),
    "tool calls without ids": lambda i: called(f"call {i}", "{}"),
}


@pytest.mark.parametrize(
    "size", [3000, pytest.param(50_000, marks=pytest.mark.slow, id="50000, 0.5 GB")]
)
def test_a_damaged_file(tmp_path, size):
    """1% of each kind: every bad line counted and listed with its reason, every good one kept."""
    kinds = [*DAMAGE, *ODD]
    wanted_bad: list[tuple[str, set[str]]] = []
    wanted_odd: list[tuple[str, str]] = []
    good = []
    path = tmp_path / "damaged.jsonl"
    with open(path, "wb") as file:
        for i in range(size):
            kind = kinds[i % 100] if i % 100 < len(kinds) else None
            where = f"damaged.jsonl:{i + 1}"
            if kind in DAMAGE:
                make, names = DAMAGE[kind]
                wanted_bad.append((where, names))
            else:
                make = ODD[kind] if kind else lambda i: json.dumps(chat(f"q {i}", id=i))
                good.append(f"0:{i + 1}")
                if kind and (kind == "tool calls without ids" or i >= 100):  # of an id, the second
                    wanted_odd.append((where, kind))
            line = make(i)
            file.write((line if isinstance(line, bytes) else line.encode()) + b"\n")
    kept = prepared(tmp_path, path, bad_lines="skip", max_line_bytes=500_000)
    out = tmp_path / "run/data/conversations"
    listed = [json.loads(line) for line in (out / "left-out.jsonl").read_text().splitlines()]
    assert [entry["where"] for entry in listed] == [where for where, _ in wanted_bad]
    for entry, (_, names) in zip(listed, wanted_bad, strict=True):
        assert entry["kind"] in names and entry["found"] and entry["expected"], entry
    assert [row["origin"] for row in kept] == good
    odd = [json.loads(line) for line in (out / "odd.jsonl").read_text().splitlines()]
    assert [(entry["where"], entry["kind"]) for entry in odd] == wanted_odd
    total = counts(tmp_path)
    assert (total["read"], total["bad"]) == (size, len(wanted_bad))


def test_one_process_or_several_the_same_bytes(tmp_path):
    rows = [chat(f"question {i % 5000}", "x" * (i % 700)) for i in range(9000)]
    rows = [row for row in rows if row["messages"][1]["content"]]
    path = jsonl(tmp_path / "a.jsonl", rows)
    made = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        prepared(folder, path, workers=workers)
        made.append(contents(folder / "run/data/conversations"))
    assert made[0] == made[1]
    assert len([name for name in made[0] if name.startswith("part-")]) == 2


def test_caps_and_filters_by_source(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [chat(f"question {i}") for i in range(300)])
    b = jsonl(tmp_path / "b.jsonl", [chat(f"other {i}", "no " * i) for i in range(1, 100)])
    found = prepared(
        tmp_path,
        {"path": str(a), "max_samples": 50, "filters": {"match_none": "[13579]$"}},
        {"path": str(b), "filters": {"max_chars": 100, "match": "^other"}},
    )
    by_source = Counter(row["source"] for row in found)
    assert by_source["a"] == 50 and 25 < by_source["b"] < 35
    assert all(int(said(r)[0][1].split()[1]) % 2 == 0 for r in found if r["source"] == "a")
    text = (tmp_path / "run/data/conversations/summary.txt").read_text()
    assert "with match_none" in text and "more than max_chars" in text and "all" in text


def test_a_capped_source_is_on_both_sides_of_the_split(tmp_path):
    rows = [chat(f"question {i}") for i in range(3000)]
    source = {"path": str(jsonl(tmp_path / "a.jsonl", rows)), "max_samples": 200}
    found = prepared(tmp_path, source, held_out=0.2)
    held = sum(row["split"] == "held_out" for row in found)
    assert len(found) == 200 and 20 < held < 60


def test_one_file_as_two_sources_of_different_filters(tmp_path):
    rows = [chat(f"question {i % 50}", "even" if i % 2 else "odd") for i in range(100)]
    path = str(jsonl(tmp_path / "a.jsonl", rows))
    found = prepared(
        tmp_path,
        {"path": path, "name": "even", "filters": {"match": "even"}},
        {"path": path, "name": "odd", "filters": {"match_none": "even"}},
    )
    assert Counter(row["source"] for row in found) == {"even": 25, "odd": 25}


def test_near_duplicates_go_on_request(tmp_path):
    pytest.importorskip("rensa")
    words = " ".join(f"word{i}" for i in range(80))
    rows = [chat(f"{words} and {i}") for i in range(5)] + [
        chat(f"{i} " + " ".join(f"w{i}x{k}" for k in range(40))) for i in range(5)
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert len(prepared(tmp_path, path)) == 10
    assert len(prepared(tmp_path, path, near_duplicates=0.8)) == 6
    assert counts(tmp_path)["near_duplicates"] == 4


def test_what_an_evaluation_suite_asks_is_not_trained_on(tmp_path, capsys):
    asked = (
        "Write a function that takes a list of numbers and returns the sum of the squares of them"
    )
    suite = jsonl(
        tmp_path / "suite.jsonl",
        [{"prompt": asked}, {"turns": ["Short one?"]}, chat("And this is a question as a chat?")],
    )
    rows = [
        chat(f"Please: {asked.upper()}!"),
        chat("Something else", f"I was asked: {asked}."),
        chat("short ONE"),
        chat("Write a function that takes a list of words"),
        chat("And this is a question as a chat?"),
        chat("A short one? No."),
    ]
    found = prepared(tmp_path, jsonl(tmp_path / "a.jsonl", rows), decontaminate=[str(suite)])
    assert [said(row)[0][1] for row in found] == [
        "Write a function that takes a list of words",
        "A short one? No.",
    ]
    assert counts(tmp_path)["contaminated"] == 4
    capsys.readouterr()
    path = config(tmp_path, tmp_path / "a.jsonl", decontaminate=[str(tmp_path / "none.jsonl")])
    assert main(["prepare", str(path)]) == 2
    assert "prepare.decontaminate" in capsys.readouterr().err


def test_null_fields_of_columns_are_no_fields(tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    other = {"function": {"name": "g", "arguments": {"y": 2}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": [call, other]},
            ]
        },
        chat("plain"),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = prepared(tmp_path, tmp_path / "a.parquet", held_out=0)
    calls = [c["function"]["arguments"] for c in first["messages"][1]["tool_calls"]]
    assert calls == [{"x": 1}, {"y": 2}]
    assert "tool_calls" not in second["messages"][1]


def test_rows_with_values_that_cannot_be_read(tmp_path):
    """Columns hold what Python cannot: bytes that are no UTF-8 in a text, years beyond 9999."""
    texts = [json.dumps(chat(f"question {i}")["messages"]).encode() for i in range(20)]
    texts[3] = b"\xff\xfe"
    messages = pa.array(texts).view(pa.string())
    times = pa.array([2**62 if i == 7 else i for i in range(20)], pa.timestamp("us"))
    pq.write_table(pa.table({"messages": messages, "at": times}), tmp_path / "a.parquet")
    kept = prepared(tmp_path, tmp_path / "a.parquet", bad_lines="skip")
    assert [row["origin"] for row in kept] == [f"0:{i + 1}" for i in range(20) if i not in (3, 7)]
    listed = (tmp_path / "run/data/conversations/left-out.jsonl").read_text().splitlines()
    bad = [json.loads(line) for line in listed]
    assert [(b["where"], b["kind"]) for b in bad] == [
        ("a.parquet:4", "value"),
        ("a.parquet:8", "value"),
    ]


def test_text_after_an_array_is_not_dropped_without_a_word(tmp_path, capsys):
    two = json.dumps([chat("a"), chat("b")])
    (tmp_path / "a.json").write_text(two + "\n" + two)
    assert main(["prepare", str(config(tmp_path, tmp_path / "a.json"))]) == 2
    assert "a.json:3: found text after the end of the array" in capsys.readouterr().err
    (tmp_path / "a.json").write_text(two + " \n")
    assert len(prepared(tmp_path, tmp_path / "a.json")) == 2


def test_no_tools_may_be_an_empty_text(tmp_path):
    rows = [chat(f"question {i}", tools=text) for i, text in enumerate(["", "[]", None] * 5)]
    found = prepared(tmp_path, jsonl(tmp_path / "a.jsonl", rows))
    assert [row["tools"] for row in found] == [None] * 15


def test_what_is_no_file_of_conversations(tmp_path, capsys, monkeypatch):
    (tmp_path / "parts").mkdir()
    bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": "a", "completion": "b"}] * 3)

    def unreachable(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("no such host")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    for source, keys, words in (
        (tmp_path / "parts", {}, ["found a folder", f"hub:{tmp_path / 'parts'}"]),
        (bad, {}, ["bad.jsonl:1", "'completion'"]),
        (bad, {"bad_lines": "skip"}, ["3 read, 3 bad"]),
        ({"path": "hub:some/set"}, {}, ["hub:some/set", "no such host"]),
    ):
        assert main(["prepare", str(config(tmp_path, source, **keys))]) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words) and "Traceback" not in said, said
        assert not list((tmp_path / "run").rglob("*.parquet"))


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        mine = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [one for child in map(int, mine) for one in (child, *descendants(child))]
    return []


def test_a_worker_ends_with_its_parent(tmp_path):
    """kill -9 leaves no process behind, and the next run gives the bytes of an undisturbed one."""
    import signal
    import subprocess
    import sys
    import time

    rows = [chat(f"question {i}", "x" * 900) for i in range(16_000)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    args = str(config(tmp_path, path, workers=2))
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", "prepare", args], stdout=subprocess.DEVNULL
    )
    children: list[int] = []
    while len(children) < 4 or not (tmp_path / "run/state.json").exists():
        assert process.poll() is None, "it ended before it could be killed"
        # two workers, the server that forked them, and multiprocessing's own tracker
        children = descendants(process.pid)
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.time() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in children) and time.time() < end:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    prepared(tmp_path, path, workers=2)
    once = contents(tmp_path / "run/data/conversations")
    (tmp_path / "other").mkdir()
    prepared(tmp_path / "other", path, workers=2)
    assert once == contents(tmp_path / "other/run/data/conversations")
