"""Real supervised runs that are harmed: the cause is named, nothing is left behind, and they end with the
bytes of an undisturbed one. faults.py prints the table of all.
"""

import json
import shutil
import subprocess
import sys

import pytest
from faults import FAULTS
from lab import Run, left_over
from runs import command, environment


@pytest.fixture(scope="module")
def before(extracted, tmp_path_factory):
    """An undisturbed run; its folder."""
    run = Run(extracted, tmp_path_factory.mktemp("undisturbed") / "run")
    assert run.again() == 0, run.said()
    return run.root


OFTEN = ["worker killed -9", "supervisor killed -9", "draftsmith stop", "stuck in Python"]
SELDOM = ["worker raises in a chain", "corrupt shard", "NaN planted", "stuck worker (SIGSTOP)",
          "two runs in one folder", "terminal closed", "bad sample", "one of two ranks killed -9",
          "an extraction worker killed -9", "clock jumps a day"]  # fmt: skip


@pytest.mark.parametrize("name", OFTEN + [pytest.param(n, marks=pytest.mark.slow) for n in SELDOM])
def test_the_cause_is_named_and_the_run_ends_as_undisturbed(name, before, tmp_path):
    row = FAULTS[name](before, tmp_path / "run")
    assert row.named, row.said
    assert row.code == 0, row.run.said()
    assert row.run.same_as(row.undisturbed or before), "training ends with the same bytes"
    assert not left_over(row.run.folder), "no process is left"


def test_a_run_that_comes_no_further_is_given_up(before, tmp_path):
    run = Run(before, tmp_path / "run", supervise={"enabled": True, "backoff_s": 0.1, "retries": 1})
    run.happened = (
        tmp_path / "never" / "there"
    )  # the fault cannot note that it happened: it always does
    run.start("raises@2")
    assert run.end() == 1
    assert "after 1 restarts that came no further" in run.said()
    status = command("status", run.root, "--json")
    assert status.returncode == 1
    failure = json.loads(status.stdout)["failure"]
    assert "No such file" in failure["cause"] and failure["category"] == "unknown"


def test_what_the_user_must_mend_is_said_once_and_a_finished_run_stays_done(before, tmp_path):
    run = Run(before, tmp_path / "run")
    assert run.again() == 0
    refused = subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", "run", str(run.config), "--prepare.held_out", "0"],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert refused.returncode == 2 and refused.stderr.count("prepare.held_out") == 1
    assert "Traceback" not in refused.stderr
    assert command("status", run.root).stdout.startswith("DONE")
    assert "nothing is at work" in command("stop", run.root).stdout


@pytest.mark.slow
def test_a_folder_that_is_deleted_stays_deleted(before, tmp_path):
    run = Run(before, tmp_path / "run")
    run.start().training()
    shutil.rmtree(run.root)
    assert run.end() == 2
    assert "gone" in run.said() and "Traceback" not in run.said().partition("gone")[2]
    assert not run.root.exists() and not left_over(run.folder)
