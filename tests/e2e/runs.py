"""A small real run: the built-in target, a few prompts, every stage in seconds; and commands as users type them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

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
    }  # fmt: skip
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(*args: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run draftsmith in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", *map(str, args)],
        capture_output=True, text=True, timeout=timeout, env=environment(),
    )  # fmt: skip


def kill_when(args: list[object], run: Path, stage: str, seen: Any, timeout: float = 120) -> None:
    """Start draftsmith, wait until `seen(run)` in this stage, kill -9."""
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", *map(str, args)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    try:
        end = time.time() + timeout
        while time.time() < end:
            assert process.poll() is None, f"the process ended before {stage} could be killed"
            state = run / "state.json"
            if state.exists() and json.loads(state.read_text())["stage"] == stage and seen(run):
                return
            time.sleep(0.005)
        raise AssertionError(f"{stage} was never seen")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def environment() -> dict[str, str]:
    """One thread, so that numbers do not depend on the machine's load."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
