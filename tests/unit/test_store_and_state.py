"""Outputs are whole or absent; state.json says what is so; metrics count what they say."""

import errno
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from draftsmith import files, manifest, metrics
from draftsmith.core import Stopped, UserError
from draftsmith.decode.speculate import Trace
from draftsmith.monitor import now as reading
from draftsmith.monitor import state


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def fail(path):
        path.write_bytes(b"half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        files.write_atomic(tmp_path / "x", fail)
    with pytest.raises(RuntimeError), files.new_folder(tmp_path / "y") as folder:
        fail(folder / "z")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_makes_a_complete_output_unfinished(tmp_path):
    started = manifest.begin(tmp_path, "x/1", {}, remake=False)
    (tmp_path / "a").write_text("data")
    manifest.finish(
        tmp_path, started, {"a": {"sha256": files.file_digest(tmp_path / "a"), "bytes": 4}}, {}
    )
    assert manifest.begin(tmp_path, "x/1", {}, remake=False)["complete"]
    (tmp_path / "a").unlink()
    assert not manifest.begin(tmp_path, "x/1", {}, remake=False)["complete"]
    (tmp_path / "a").write_text("dat")
    with pytest.raises(UserError, match="found 3 bytes; expected 4"):
        manifest.begin(tmp_path, "x/1", {}, remake=False)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"bytes": 4', '"bytes": 3'))
    with pytest.raises(UserError, match="its checksum differs"):
        manifest.begin(tmp_path, "x/1", {}, remake=False)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="broken JSON"):
        manifest.begin(tmp_path, "x/1", {}, remake=False)


def test_state_of_a_stage_that_ends_well_badly_or_is_stopped(tmp_path):
    with state.stage_report(tmp_path, "train") as report:
        assert reading.read(tmp_path)["state"] == "LOADING"
        report.working(10, "steps", done=4)
        report.progress(7, loss=1.5)
        now = reading.read(tmp_path)
        assert (now["state"], now["total"], now["unit"]) == ("TRAINING", 10, "steps")
        with (
            pytest.raises(UserError, match="another draftsmith process"),
            state.stage_report(tmp_path, "train"),
        ):
            pass
    now = reading.read(tmp_path)
    assert now["state"] == "DONE" and now["done"] == 7 and now["last"]["loss"] == 1.5
    with pytest.raises(RuntimeError), state.stage_report(tmp_path, "extract"):
        raise RuntimeError("the true cause")
    assert "the true cause" in reading.line(reading.read(tmp_path))
    with pytest.raises(Stopped), state.stage_report(tmp_path, "extract"):
        raise KeyboardInterrupt
    assert reading.read(tmp_path)["state"] == "STOPPED"
    kinds = [
        json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()
    ]
    assert kinds == ["start", "working", "done", "start", "failed", "start", "stopped"]


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(state.fcntl, "flock", flock)
    with (
        pytest.raises(UserError, match="without locks.*-o flock"),
        state.locked(tmp_path),
    ):
        pass


def test_a_dead_process_is_failed_and_one_that_does_not_advance_is_stalled(tmp_path, monkeypatch):
    body = (
        "import sys,time; from pathlib import Path; from draftsmith.monitor.state import stage_report\n"
        "with stage_report(Path(sys.argv[1]), 'extract') as r:\n"
        "    r.working(9, 'tokens'); r.progress(1); print('up', flush=True); time.sleep(60)\n"
    )
    monkeypatch.setenv("DRAFTSMITH_STALL_S", "1.5")
    process = subprocess.Popen(
        [sys.executable, "-c", body, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and "up" in [
        process.stdout.readline().strip() for _ in range(2)
    ]
    assert reading.read(tmp_path)["state"] == "EXTRACTING"
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 86400)
    assert reading.read(tmp_path)["state"] == "EXTRACTING", "a clock that jumps stalls nothing"
    monkeypatch.setattr(time, "time", clock)
    time.sleep(1.6)
    assert reading.read(tmp_path)["state"] == "STALLED"
    process.kill()
    process.wait()
    now = reading.read(tmp_path)
    assert now["state"] == "FAILED" and str(process.pid) in now["failure"]["cause"]


def test_sigterm_is_stopped(tmp_path):
    body = (
        "import sys,time; from pathlib import Path; from draftsmith.monitor.state import stage_report\n"
        "from draftsmith.signals import sigterm_unwinds\n"
        "with sigterm_unwinds(), stage_report(Path(sys.argv[1]), 'extract') as r:\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", body, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, 15)
    process.wait()
    assert reading.read(tmp_path)["state"] == "STOPPED"


def test_metrics_count_tokens_a_call_with_the_prefills_token_left_out():
    ar = Trace(
        tokens=[1, 2, 3, 4, 5], emitted=[1, 1, 1, 1], accepted=[0] * 4, gaps=[9.0] * 5, decode_s=4.0
    )
    spec = Trace(tokens=[1, 2, 3, 4, 5], emitted=[3, 1], accepted=[2, 1], decode_s=2.0)
    one = metrics.summarize([spec], [ar], block_size=4)
    assert one["tau_pooled"] == one["tau_mean"] == 2.0
    assert one["survival"] == [1.0, 0.5, 0.0] and one["histogram"] == [0, 1, 0, 1, 0]
    assert (one["target_calls_per_token"], one["speedup"], one["tokens_per_s"]) == (0.5, 2.0, 2.0)
    assert (one["identical"], one["mismatches"], one["near_ties"]) == (1, 0, 0)
    low, high = metrics.bootstrap_tau(np.array([8, 2] * 20), np.array([2, 2] * 20))
    assert 1.5 < low < 2.5 < high < 3.5


def test_a_difference_is_a_near_tie_only_where_the_two_logits_nearly_tie():
    def trace(tokens, gap=5.0):
        return Trace(tokens=tokens, gaps=[5.0, gap, 5.0], emitted=[1, 1], accepted=[0, 0])

    one = metrics.compare([trace([1, 7, 3])], [trace([1, 2, 3], gap=5e-4)])
    assert (one["identical"], one["mismatches"], one["near_ties"]) == (0, 0, 1)
    two = metrics.compare([trace([1, 7, 3])], [trace([1, 2, 3])])
    assert (two["identical"], two["mismatches"], two["near_ties"]) == (0, 1, 0)
    assert two["differences"] == [
        {"prompt": 0, "token": 1, "top2_gap": 5.0}
    ]  # judged by no forward
    cut = metrics.compare([trace([1, 2])], [trace([1, 2, 3])])
    assert cut["mismatches"] == 1, "a text that stops early is another text"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "TRAIN'])
def test_a_broken_state_file_is_one_message(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match="no state"):
        reading.read(tmp_path)


def test_a_reused_pid_does_not_look_alive(tmp_path):
    with state.stage_report(tmp_path, "train") as report:
        report.working(3, "steps")
    now = {**report.state, "state": "TRAINING"}
    now["workers"] = [{**now["workers"][0], "pid": 1}]
    (tmp_path / "state.json").write_text(json.dumps(now))
    assert reading.read(tmp_path)["state"] == "FAILED"
    now["workers"][0]["host"] = "elsewhere"
    (tmp_path / "state.json").write_text(json.dumps({**now, "heartbeat_at": time.time() - 500}))
    assert reading.read(tmp_path)["state"] == "FAILED", "no heartbeat from another host"
