"""What viewers show: events in words, curves that a restart takes back, the terminal's view, the page's doors."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from rich.console import Console

from draftsmith import background
from draftsmith.core import UserError
from draftsmith.monitor import gpus, now, processes, state, terminal, web
from draftsmith.monitor.history import POINTS, History, thinned


def event(root, stage, kind, **fields):
    state.event(root, stage, kind, **fields)


def training(root, steps=20):
    """A folder of a run that trains, as if this process did it."""
    with state.stage_report(root, "extract") as report:
        report.working(10, "samples")
        report.progress(10)
    with state.stage_report(root, "train") as report:
        report.working(steps, "steps")
        for step in range(1, steps + 1):
            report.event("step", step=step, loss=8.0 / step, tokens_per_s=100.0 + step)
        report.event("verdict", step=steps, tau=2.5, tau_lookup=1.25)
        report.progress(steps, loss=0.4)


def test_a_board_holds_stages_curves_and_events(tmp_path):
    training(tmp_path)
    history = History(tmp_path)
    board = history.board()
    assert [stage["name"] for stage in board["stages"]] == ["extract", "train"]
    assert {stage["state"] for stage in board["stages"]} == {"done"}
    assert board["curves"]["loss"][0] == (1, 8.0) and board["curves"]["loss"][-1] == (20, 0.4)
    assert board["curves"]["tau"] == [(20, 2.5)]
    assert "step 20: held-out tau 2.50" in [line["text"] for line in board["recent"]]
    json.dumps(board)
    event(
        tmp_path, "train", "working", total=20, unit="steps", done=5
    )  # killed, and begun again there
    event(tmp_path, "train", "step", step=6, loss=9.0)
    loss = dict(history.board()["curves"]["loss"])
    assert max(loss) == 6 and loss[6] == 9.0 and loss[5] == 8.0 / 5
    assert "tau" not in history.board()["curves"]


def test_a_stage_that_is_skipped_or_refused_stays_what_it_was(tmp_path):
    training(tmp_path)
    history = History(tmp_path)
    before = history.board()["stages"]
    event(tmp_path, "extract", "start")
    event(tmp_path, "extract", "queued")
    event(tmp_path, "train", "start")
    event(tmp_path, "train", "failed", cause="refused")
    assert history.board()["stages"] == before
    event(tmp_path, "train", "start")
    event(tmp_path, "train", "working", total=30, unit="steps", done=20)
    event(tmp_path, "train", "failed", cause="in the middle")
    assert history.board()["stages"][-1]["state"] == "failed"


def test_half_a_line_is_read_when_it_is_whole_and_a_new_folder_from_its_beginning(tmp_path):
    training(tmp_path, steps=3)
    history = History(tmp_path)
    path = tmp_path / "events.jsonl"
    line = json.dumps({"at": 1.0, "stage": "train", "kind": "step", "step": 4, "loss": 7.0}) + "\n"
    with open(path, "a") as file:
        file.write(line[:20])
    assert len(history.board()["curves"]["loss"]) == 3
    with open(path, "a") as file:
        file.write(line[20:])
    assert history.board()["curves"]["loss"][-1] == (4, 7.0)
    path.write_text(line)
    assert history.board()["curves"]["loss"] == [(4, 7.0)]


@pytest.mark.parametrize("line", [
    '{"at": 1}', "[]", "3", '{"at": 1, "stage": "train", "kind": "step"}', "[" * 5000,
    '{"at": 1, "stage": "train", "kind": "verdict", "step": 3}', '{"at": 1, "stage": "train", "kind": "failed"}',
    '{"at": 1, "stage": "train", "kind": "step", "step": "x", "loss": 1}', "\x00\xff",
])  # fmt: skip
def test_a_line_that_is_no_event_is_passed_over(tmp_path, line):
    training(tmp_path)
    path = tmp_path / "events.jsonl"
    path.write_text(path.read_text() + line + "\n")
    event(tmp_path, "train", "step", step=21, loss=0.25)
    board = History(tmp_path).board()
    assert board["curves"]["loss"][-1] == (21, 0.25)
    json.dumps(board)


NOW = {"state": "TRAINING", "stage": "train", "done": 1, "workers": [{"pid": 1, "host": "x"}]}


@pytest.mark.parametrize("said", [
    [], None, 5, "a", {}, {**NOW, "state": 7}, {**NOW, "total": "many"}, {**NOW, "failure": "x"},
    {**NOW, "workers": []}, {**NOW, "gpus": [{}]}, {**NOW, "last": 3}, {**NOW, "heartbeat_at": "now"},
    {**NOW, "rate": [1]},
])  # fmt: skip
def test_a_damaged_state_is_one_message_and_a_damaged_supervisor_is_none(tmp_path, said):
    (tmp_path / "state.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="no state"):
        now.read(tmp_path)
    assert History(tmp_path).board()["state"]["state"] == "UNKNOWN"
    (tmp_path / "state.json").write_text(json.dumps({**NOW, "state": "DONE"}))
    (tmp_path / "supervisor.json").write_text(json.dumps(said))
    with state.locked(tmp_path, now.SUPERVISOR_LOCK):
        assert now.read(tmp_path)["state"] == "DONE"


def test_stop_tells_no_process_that_only_has_the_number(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    said = {"pid": bystander.pid, "began": "1", "host": socket.gethostname(), "started_at": 1.0, "heartbeat_at": 1.0,
            "try": "1:0", "restarts": 0}  # fmt: skip
    (tmp_path / "supervisor.json").write_text(json.dumps(said))
    worker = {"pid": bystander.pid, "began": "1", "host": socket.gethostname()}
    queued = {**NOW, "state": "QUEUED", "workers": [worker]}
    (tmp_path / "state.json").write_text(json.dumps(queued))
    with state.locked(tmp_path, now.SUPERVISOR_LOCK):
        assert background.stop(tmp_path) == 0
    assert background.stop(tmp_path) == 0
    assert now.read(tmp_path)["state"] == "FAILED", "another process has its number"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_long_curves_are_thinned_and_keep_their_end():
    curve = {step: float(step) for step in range(1, 5 * POINTS + 4)}
    points = thinned(curve)
    assert len(points) <= POINTS and points[-1] == (5 * POINTS + 3, 5.0 * POINTS + 3)
    assert thinned({1: 2.0}) == [(1, 2.0)]


def test_the_terminal_shows_progress_curves_and_the_cause(tmp_path):
    training(tmp_path)
    with pytest.raises(RuntimeError), state.stage_report(tmp_path, "evaluate") as report:
        report.working(4, "prompts")
        report.progress(1)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    for width, encoding in ((100, "utf-8"), (60, "ascii")):
        console = Console(width=width, record=True, file=open("/dev/null", "w", encoding=encoding))  # noqa: SIM115
        console.print(terminal.panel(History(tmp_path).board(), console))
        text = console.export_text()
        for part in (
            "FAILED",
            "evaluate",
            "GPU memory: RuntimeError",
            "1/4 prompts",
            "loss",
            "train ok",
        ):
            assert part in text, part
        assert max(map(len, text.splitlines())) <= width
    assert (terminal.BLOCKS[7] in text) is False, "an ASCII terminal gets ASCII curves"


def test_out_of_gpu_memory_is_told_with_this_runs_numbers(tmp_path, monkeypatch):
    found = [
        {"index": 0, "name": "x", "used_bytes": 90 << 30, "total_bytes": 96 << 30, "use": None}
    ]
    monkeypatch.setattr(state, "gpus", lambda: found)
    with (
        pytest.raises(RuntimeError),
        state.stage_report(tmp_path, "train", "train.micro_batch_tokens 4096"),
    ):
        raise RuntimeError("CUDA out of memory. Tried to allocate 7.60 GiB")
    remedy = now.read(tmp_path)["failure"]["remedy"]
    assert "Now: train.micro_batch_tokens 4096, gpu0 6.0 of 96.0 GiB free." in remedy


def test_a_curve_in_characters():
    assert terminal.spark([0, 1, 2, 3], 4, "0123") == "0123"
    assert terminal.spark([5, 5], 10, "0123") == "00"
    assert terminal.spark(list(range(100)), 4, "0123") == "0123"


def test_processes_below_are_found_described_and_ended():
    sleep = "import time; time.sleep(60)"
    body = f"import subprocess,sys; subprocess.Popen([sys.executable,'-c',{sleep!r}]); {sleep}"
    process = subprocess.Popen([sys.executable, "-c", body])
    me = processes.descendants
    deadline = time.monotonic() + 20
    while len(me(process.pid)) < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    (child,) = me(process.pid)
    process.send_signal(19)
    while not processes.described(process.pid)["stopped"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes.described(process.pid) == {
        "pid": process.pid,
        "role": "child",
        "stopped": True,
    }
    processes.end([process.pid, child], wait_s=0.5)
    assert not processes.alive(process.pid) and not processes.alive(child)


def test_the_innermost_frame_of_ours_is_named():
    spy = (
        'Thread 0x7F (idle): "heart"\n    wait (threading.py:331)\n'
        'Thread 0x7E (active): "MainThread"\n    recv (socket.py:1)\n    next (draftsmith/features.py:88)\n'
    )
    assert processes.innermost(spy) == "recv (socket.py:1), from next (draftsmith/features.py:88)"
    fault = (
        'Thread 0x7F (most recent call first):\n  File "/a/threading.py", line 331 in wait\n\n'
        'Current thread 0x7E (most recent call first):\n  File "/a/draftsmith/x.py", line 7 in step\n'
    )
    assert processes.innermost(fault) == "step (draftsmith/x.py:7)"
    assert processes.innermost("") == ""


def test_no_gpu_is_no_error():
    assert isinstance(gpus.gpus(), list)


@pytest.fixture
def page(tmp_path):
    """The page of a run, served; its address, and a way to ask."""
    training(tmp_path / "a")
    import uvicorn

    servers = []

    def serve(token):
        config = uvicorn.Config(web.app([tmp_path / "a"], token), port=0, log_level="error")
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        servers.append(server)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield serve
    for server in servers:
        server.should_exit = True


def ask(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(NoRedirect)
    try:
        answer = opener.open(request, timeout=5)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, dict(answer.headers), answer


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args):
        return None


def test_the_page_streams_what_the_files_say(page):
    url = page(None)
    status, headers, answer = ask(url + "/")
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    text = answer.read().decode()
    assert (
        "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    )
    _, _, stream = ask(url + "/events")
    data = next(line for line in stream if line.startswith(b"data: "))
    (board,) = json.loads(data[6:])
    assert board["state"]["state"] == "DONE" and board["curves"]["tau"] == [[20, 2.5]]
    again = next(line for line in stream if line.startswith(b"data: "))
    assert "curves" not in json.loads(again[6:])[0], "sent once"
    for number in ("0", "7", "9" * 5000, "-1", "x", "%2e%2e"):
        assert ask(f"{url}/runs/{number}/report")[0] == 404
    assert ask(url + "/", Host="evil.example")[0] == 400, "a name that was pointed here"


def test_elsewhere_a_token_is_asked_for(page):
    url = page("secret")
    for path in ("/", "/events", "/runs/0/report", "/runs/9/report", "/?token=wrong"):
        assert ask(url + path)[0] == 401, path
    assert ask(url + "/events", Cookie="draftsmith_token=wrong")[0] == 401
    status, headers, _ = ask(url + "/?token=secret")
    assert status == 307 and "token" not in headers["location"]
    cookie = headers["set-cookie"].split(";")[0]
    assert "HttpOnly" in headers["set-cookie"]
    assert ask(url + "/", Cookie=cookie)[0] == 200


def test_only_this_machines_own_addresses_need_no_token():
    assert web.is_loopback("127.0.0.1") and web.is_loopback("::1") and web.is_loopback("localhost")
    assert not web.is_loopback("0.0.0.0") and not web.is_loopback("10.0.0.7")


def test_a_port_in_use_is_one_message(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="in use"):
            web.serve([tmp_path], host="127.0.0.1", port=taken.getsockname()[1])
