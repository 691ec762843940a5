"""A small real run: the built-in target, a few prompts, every stage in seconds; and commands as users type them."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from draftsmith.cli import main
from tiny_models import assets


def write_config(folder: Path, prompts: int = 40, **sections: dict[str, Any]) -> Path:
    """CONFIG for a run in `folder`/run; keyword sections are merged over small defaults."""
    data = folder / "prompts.jsonl"
    lines = (assets() / "demo-prompts.jsonl").read_text().splitlines()[:prompts]
    data.write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "target": {"model": str(assets() / "tiny-hybrid"), "dtype": "float32", "device": "cpu"},
        "prepare": {"sources": [{"path": str(data)}], "held_out": 0.1},
        "regenerate": {"max_new_tokens": 24, "batch_size": 4, "answers_per_file": 8, "loop_ngram": 12},
        "tokenize": {"max_length_tokens": 256, "template_kwargs": {}},
        "features": {"num_taps": 3},
        "extract": {"tokens_per_batch": 512, "shard_bytes": 500_000},
        "drafter": {"layers": 2, "block_size": 4},
        "train": {"epochs": 2, "tokens_per_step": 256, "micro_batch_tokens": 256, "anchors_per_sample": 4,
                  "checkpoint_every": 3, "log_every": 1},
        "evaluate": {"methods": ["ar", "lookup", "chain", "tree", "untrained", "shuffled"], "max_prompts": 3,
                     "max_new_tokens": 24, "tree_budget": 9, "loop_ngram": 12},
        "supervise": {"enabled": False},
    }  # fmt: skip
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


OUTPUTS = {
    "prepare": "data/conversations",
    "regenerate": "data/answers",
    "tokenize": "data/tokens",
    "extract": "features",
}


def resume(extracted: Path, folder: Path, last: str, **sections: dict[str, Any]) -> Path:
    """CONFIG for a run in `folder`/run whose stages up to `last` are done: those of `extracted`,
    with which `sections` must agree so far.
    """
    config = write_config(folder, **sections)
    for stage, output in OUTPUTS.items():
        shutil.copytree(extracted / output, folder / "run" / output)
        if stage == last:
            break
    return config


def command(
    *args: object, timeout: float = 300, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run draftsmith in a process of its own; `fresh`: in a new interpreter, as a user starts it."""
    words = list(map(str, args))
    if fresh:
        return subprocess.run(
            [sys.executable, "-m", "draftsmith.cli", *words],
            capture_output=True, text=True, timeout=timeout, env=environment(),
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process = _started(words, *said)
        process.join(timeout)
        code = process.exitcode
        if code is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in said))


def kill_when(args: list[object], run: Path, stage: str, seen: Any, timeout: float = 120) -> None:
    """Start draftsmith, wait until `seen(run)` in this stage, kill -9."""
    nowhere = Path(os.devnull)
    process = _started(list(map(str, args)), nowhere, nowhere)
    try:
        end = time.time() + timeout
        while time.time() < end:
            assert process.is_alive(), f"the process ended before {stage} could be killed"
            state = run / "state.json"
            if state.exists() and json.loads(state.read_text())["stage"] == stage and seen(run):
                return
            time.sleep(0.005)
        raise AssertionError(f"{stage} was never seen")
    finally:
        process.kill()
        process.join()


READY = multiprocessing.get_context("forkserver")
READY.set_forkserver_preload(["draftsmith.pipeline", "draftsmith.check_store"])
"""Commands are forked from a process that has imported torch already: importing it takes longer
than most of them."""


def _started(args: list[str], stdout: Path, stderr: Path) -> Any:
    process = READY.Process(target=_command, args=(args, stdout, stderr, environment()))
    process.start()
    return process


def _command(args: list[str], stdout: Path, stderr: Path, env: dict[str, str]) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    sys.exit(main(args))


def environment() -> dict[str, str]:
    """One thread, so that numbers do not depend on the machine's load."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but those that torch.distributed.checkpoint gives a random id."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".metadata"
    }
