"""Answers by a real OpenAI-compatible server (`transformers serve`, a process of its own) on the
built-in target, which is also killed, stopped and told to cut off; and through a proxy before it that
answers 429 and 500, drops, cuts and garbles.
"""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from runs import command, contents, kill_when, write_config
from transformers import AutoTokenizer

from draftsmith import prepare, regenerate, tables
from draftsmith import tokenize as tokenize_stage
from draftsmith.cli import main
from draftsmith.configfile import load
from draftsmith.regenerate.journal import Journal
from draftsmith.serving.launch import running
from tiny_models import assets

pytest.importorskip("fastapi")
SERVE = f"{sys.executable} -m transformers.cli.transformers serve {assets() / 'tiny-hybrid'}"
OPTIONS = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with running(SERVE, OPTIONS, log, wait_s=120) as url:
        yield url


class Proxy:
    """Passes requests on, unless `fault(number of this question's asking, body)` says otherwise."""

    def __init__(self, url: str, fault: Callable[[int, dict[str, Any]], str]) -> None:
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                try:
                    with urllib.request.urlopen(url + self.path) as answer:
                        self._send(answer.status, answer.read())
                except urllib.error.HTTPError as error:
                    self._send(error.code, b"{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                question = json.dumps(json.loads(body)["messages"])
                proxy.asked[question] += 1
                what = fault(proxy.asked[question], json.loads(body))
                if what == "429":
                    self._send(429, b"{}", {"Retry-After": "0"})
                elif what.isdigit():
                    self._send(int(what), b'{"error": "injected"}')
                elif what == "stall":
                    time.sleep(12)
                    self.close_connection = True
                elif what == "drop":
                    self.close_connection = True
                else:
                    request = urllib.request.Request(url + self.path, body, dict(self.headers))
                    answer = urllib.request.urlopen(request).read()
                    if what == "cut":
                        self._send(200, answer, length=len(answer) + 100)
                        self.close_connection = True
                    elif what == "garbage":
                        self._send(200, b'{"choices": []}')
                    else:
                        proxy.answered[question] += 1
                        self._send(200, answer)

            def _send(self, code: int, body: bytes, more: Any = None, length: Any = None) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                for name, value in (more or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def config(folder: Path, url: str | None, prompts: int = 8, turns: str = "last", **asked: Any):
    """CONFIG whose answers come from `url`."""
    settings = {"concurrency": 2, "retries": 4, "max_new_tokens": 8, "loop_ngram": None, **asked}
    if url:
        settings["servers"] = [url]
    tokens = {"turns": turns, "max_length_tokens": 512}
    return write_config(folder, prompts, regenerate=settings, tokenize=tokens)


def answers(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    cfg = load(path)
    rows = tables.read_rows(regenerate.folder(cfg), regenerate.finished(cfg))
    return {(row["sample_id"], row["turn"]): row for row in rows}


def made(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    assert main(["prepare", str(path)]) == 0 and main(["regenerate", str(path)]) == 0
    return answers(path)


def test_a_server_answers_as_the_target_does_in_process(server, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    served = made(config(tmp_path / "a", server, max_new_tokens=24))
    path = write_config(tmp_path / "b", 8, regenerate={"loop_ngram": None})
    alone = made(path)
    assert served.keys() == alone.keys() and len(served) == 8
    tokenizer = AutoTokenizer.from_pretrained(assets() / "tiny-hybrid")
    for key, row in served.items():
        assert row["prompt_ids"] == alone[key]["prompt_ids"]
        texts = [
            tokenizer.decode(ids, skip_special_tokens=True).rstrip()
            for ids in (row["answer_ids"], alone[key]["answer_ids"])
        ]
        assert texts[0] == texts[1], "this server returns text, and cuts the space at its end"
        assert (row["answer_ids"][-1] == tokenizer.eos_token_id) == (row["stop_reason"] == "eos")
    cfg = load(tmp_path / "a" / "config.yaml")
    assert not (regenerate.folder(cfg) / "journal.jsonl").exists()
    assert main(["tokenize", str(tmp_path / "a" / "config.yaml")]) == 0


def test_sampled_in_process_by_each_questions_own_seed(tmp_path):
    """Held-out answers stay greedy; a batch, or a run that is resumed, draws the same."""
    rows = {}
    for name, asked in {
        "greedy": {},
        "drawn": {"temperature": 1.0},
        "again": {"temperature": 1.0, "batch_size": 3, "answers_per_file": 6},
        "narrow": {"temperature": 1.0, "top_k": 1},
    }.items():
        (tmp_path / name).mkdir()
        settings = {"loop_ngram": None, "max_new_tokens": 12, **asked}
        path = write_config(tmp_path / name, 24, prepare={"held_out": 0.3}, regenerate=settings)
        rows[name] = {key: row["answer_ids"] for key, row in made(path).items()}
    cfg = load(path)
    kept = tables.read_rows(prepare.folder(cfg), prepare.finished(cfg))
    held = {row["sample_id"] for row in kept if row["split"] == "held_out"}
    assert 2 < len(held) < 20
    differ = {key for key, ids in rows["drawn"].items() if ids != rows["greedy"][key]}
    assert differ and not {sample for sample, _ in differ} & held
    assert rows["again"] == rows["drawn"] and rows["narrow"] == rows["greedy"]


def test_faults_are_asked_again_and_refusals_are_listed(server, tmp_path):
    kinds = ["429", "500", "503", "drop", "cut", "garbage", "stall"]
    order: dict[str, int] = {}

    def fault(times: int, body: dict[str, Any]) -> str:
        mine = order.setdefault(json.dumps(body["messages"]), len(order))
        if mine == 0:
            return "400"
        return kinds[mine % len(kinds)] if times == 1 else "ok"

    proxy = Proxy(server, fault)
    path = config(tmp_path, proxy.url, prompts=12, timeout_s=6, max_failures=0.2)
    rows = made(path)
    proxy.close()
    assert len(rows) == 11
    cfg = load(path)
    (failure,) = (regenerate.folder(cfg) / "failures.jsonl").read_text().splitlines()
    assert "HTTP 400" in failure and "prompts.jsonl:" in failure
    assert set(proxy.answered.values()) == {1}, "nothing is answered twice"
    counts = regenerate.finished(cfg)["counts"]
    assert counts["answers"] == 11 and counts["failed"] == 1


def test_too_many_failures_are_a_fault_and_only_they_are_asked_again(server, tmp_path, capsys):
    broken = True

    def fault(times: int, body: dict[str, Any]) -> str:
        return "400" if broken and len(json.dumps(body)) % 2 else "ok"

    proxy = Proxy(server, fault)
    path = config(tmp_path, proxy.url, prompts=12)
    assert main(["prepare", str(path)]) == 0
    assert main(["regenerate", str(path)]) == 2
    assert "questions without an answer" in capsys.readouterr().err
    broken = False
    assert main(["regenerate", str(path)]) == 0
    proxy.close()
    assert len(answers(path)) == 12 and set(proxy.answered.values()) == {1}


def test_killed_it_asks_nothing_twice(server, tmp_path):
    def fault(times: int, body: dict[str, Any]) -> str:
        time.sleep(0.2)
        return "ok"

    proxy = Proxy(server, fault)
    path = config(tmp_path, proxy.url, prompts=9, concurrency=1)
    assert main(["prepare", str(path)]) == 0

    def some_answers(run: Path) -> bool:
        journal = run / "data/answers/journal.jsonl"
        return journal.exists() and journal.read_bytes().count(b"\n") >= 3

    kill_when(["regenerate", path], tmp_path / "run", "regenerate", some_answers)
    before = dict(proxy.answered)
    assert command("regenerate", path).returncode == 0
    proxy.close()
    twice = [question for question, times in proxy.answered.items() if times > 1]
    assert len(before) >= 3 and len(twice) <= 1, "at most the one that was on its way"
    (tmp_path / "other").mkdir()
    other = config(tmp_path / "other", server, prompts=9)
    made(other)
    one, two = (
        contents(tmp_path / "run/data/answers"),
        contents(tmp_path / "other/run/data/answers"),
    )
    assert one == two, "the bytes of an undisturbed run"


def test_servers_that_die_stop_the_stage_with_their_last_word(server, tmp_path, capsys):
    proxy = Proxy(server, lambda times, body: "drop")
    path = config(tmp_path, proxy.url, prompts=40, retries=0)
    assert main(["prepare", str(path)]) == 0
    assert main(["regenerate", str(path)]) == 2
    said = capsys.readouterr().err
    assert "in a row without an answer" in said and "RemoteProtocolError" in said
    proxy.close()
    assert main(["regenerate", str(path)]) == 2
    assert "nothing that answers" in capsys.readouterr().err


STAND_IN = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
        self.answer(200 if self.path in known else 404, known.get(self.path, {}))
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.1)
        said = {"role": "assistant", "content": "An answer."}
        self.answer(200, {"choices": [{"message": said, "finish_reason": "stop"}]})
    def answer(self, code, data):
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_launched_server_is_revived_and_stopped(tmp_path):
    """A stand-in that starts at once: what is tested is who starts and stops it."""
    (tmp_path / "server.py").write_text(STAND_IN)
    command_line = f"{sys.executable} {tmp_path / 'server.py'} serve"
    path = config(tmp_path, None, prompts=24, launch=command_line, wait_s=60, retries=8)
    assert main(["prepare", str(path)]) == 0
    log = tmp_path / "run/logs/server-0.log"
    killed: list[int] = []

    def kill() -> None:
        journal = tmp_path / "run/data/answers/journal.jsonl"
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 3):
            time.sleep(0.05)
        port = log.read_text().splitlines()[0].split()[-1]
        killed.extend(serving(port))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert main(["regenerate", str(path)]) == 0
    thread.join()
    assert killed and len(answers(path)) == 24
    assert log.read_text().count("server.py serve --port") == 2
    assert not serving(log.read_text().splitlines()[0].split()[-1])


def test_a_server_that_stands_still_is_asked_again_and_cuts_are_recorded(server, tmp_path):
    """The real server is stopped (SIGSTOP) longer than a request may take, and goes on."""
    path = config(tmp_path, server, prompts=10, timeout_s=4, retries=8, max_new_tokens=4)
    assert main(["prepare", str(path)]) == 0
    stood = []

    def stand_still() -> None:
        journal = tmp_path / "run/data/answers/journal.jsonl"
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
            time.sleep(0.02)
        stood.extend(serving(server.rsplit(":", 1)[1]))
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            for pid in stood:
                os.kill(pid, sign)
            time.sleep(6)

    thread = threading.Thread(target=stand_still)
    thread.start()
    assert main(["regenerate", str(path)]) == 0
    thread.join()
    last = json.loads((tmp_path / "run/state.json").read_text())["last"]
    assert stood and last["asked again"] > 0
    rows = answers(path)
    tokenizer = AutoTokenizer.from_pretrained(assets() / "tiny-hybrid")
    assert len(rows) == 10 and {row["stop_reason"] for row in rows.values()} == {"length"}
    assert all(row["answer_ids"][-1] != tokenizer.eos_token_id for row in rows.values())


def serving(port: str) -> list[int]:
    """The processes of this test's server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and port.encode() in words:
            found.append(int(folder.name))
    return found


def test_all_turns_are_the_targets_own_and_tool_results_are_replayed(server, tmp_path):
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    data = [
        {"role": "user", "content": "What does len do?"},
        {"role": "assistant", "content": "as given 1"},
        {"role": "user", "content": "Finish this function.\n```python\ndef add(a, b):\n```"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "as given 3"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    path = config(tmp_path, server, turns="all")
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()[:4]
    lines.insert(0, json.dumps({"messages": data, "tools": tools}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    rows = made(path)
    cfg = load(path)
    sample = next(
        r["sample_id"]
        for r in tables.read_rows(prepare.folder(cfg), prepare.finished(cfg))
        if r["tools"]
    )
    assert [key for key in rows if key[0] == sample] == [(sample, 1), (sample, 3), (sample, 5)]
    own = json.loads(rows[sample, 1]["message"])["content"]
    assert own != "as given 1"
    tokenizer = AutoTokenizer.from_pretrained(cfg.target.model)
    third = tokenizer.decode(rows[sample, 5]["prompt_ids"])
    assert own.strip() in third and "as given 1" not in third and "42" in third
    assert main(["tokenize", str(path)]) == 0
    samples = tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg))
    mine = [s for s in samples if s.sample_id % (1 << 40) == sample]
    assert sum(sum(s.loss_mask) for s in mine) == sum(
        len(row["answer_ids"]) for key, row in rows.items() if key[0] == sample
    )


def test_a_torn_journal_line_is_asked_again(tmp_path):
    journal = Journal(tmp_path)
    journal.add({"sample_id": 0, "turn": 1, "answer_ids": [1]})
    journal.fail(1, 1, "no")
    journal.add({"sample_id": 2, "turn": 1, "answer_ids": [2]})
    journal.close()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = Journal(tmp_path)
    assert (0, 1) in again and (2, 1) not in again and (1, 1) not in again
    assert not again.failures, "another run asks it again"
    again.add({"sample_id": 2, "turn": 1, "answer_ids": [3]})
    again.close()
    assert [r["answer_ids"] for r in Journal(tmp_path).answers()] == [[1], [3]]
