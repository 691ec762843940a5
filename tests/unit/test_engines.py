"""Workers that die, fail or end: every task is done, once or again, and nothing is left behind."""

import os
import signal
import time
from functools import partial

import pytest

from draftsmith.core import FaultFound, UserError
from draftsmith.engines.local import run_tasks


def square(folder, tasks, say, done):
    """A file for each task; worker processes import this by name."""
    for number, payload in tasks:
        say(("began", os.getpid()))
        (folder / f"pid-{os.getpid()}").touch()
        end = time.time() + 60
        while payload == "together" and len(list(folder.glob("pid-*"))) < 2 and time.time() < end:
            time.sleep(0.01)
        if payload == "die once" and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if payload == "die always":
            os.kill(os.getpid(), signal.SIGKILL)
        if payload == "refuse":
            raise UserError(where="here", found="x", expected="y", remedy="z")
        (folder / str(number)).write_text(str(number**2))
        done(number)


def run(folder, payloads, workers=2):
    """(messages, losses) of these tasks."""
    messages, losses = [], []
    run_tasks(
        partial(square, folder),
        list(range(len(payloads))),
        load=payloads.__getitem__,
        gpus=[None] * workers,
        on_message=messages.append,
        on_loss=lambda said, tasks: losses.append((said, tasks)),
    )
    return messages, losses


def made(folder) -> set[str]:
    """What the tasks left."""
    return {f.name for f in folder.iterdir() if not f.name.startswith("pid-")}


def test_every_task_is_done_by_several_workers(tmp_path):
    messages, losses = run(tmp_path, ["together"] * 12)
    assert {int(name) for name in made(tmp_path)} == set(range(12)) and not losses
    pids = {pid for _, pid in messages}
    assert len(pids) == 2 and os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_workers_tasks_are_done_by_another(tmp_path):
    _, losses = run(tmp_path, ["go", "go", "die once", "go", "go"])
    assert made(tmp_path) == {"died", *"01234"}
    ((said, tasks),) = losses
    assert "signal 9" in said and 2 in tasks


def test_workers_that_always_die_end_the_work(tmp_path):
    with pytest.raises(FaultFound, match="signal 9.*after 3 others"):
        run(tmp_path, ["die always", "go"])


def test_a_workers_refusal_is_raised_as_it_was(tmp_path):
    with pytest.raises(UserError, match="here: found x"):
        run(tmp_path, ["go", "refuse", "go"])
