"""How fast prepare and tokenize are, beside the tokenizer alone on the same texts, and their peak memory.

    python recipes/data/measure.py WORK --samples 1000000 --repeats 1

Synthetic chats of about 1k tokens, cut from the standard library's sources, with the built-in
target's tokenizer (or --target). The tokenizer alone and `tokenize` run by turns, `--repeats` times,
so that other load on the machine meets both. Prints one JSON object. `*_s` are wall seconds, `*_cpu_s`
those of all cores and processes. What starting takes (imports, the tokenizer: about ten seconds) is in
them, so small sets look slow. `*_peak_gb` is the proportional set size of all processes together.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import yaml
from transformers import AutoTokenizer

import draftsmith

BUILTIN = Path(draftsmith.__file__).parent / "assets" / "tiny-hybrid"


@dataclass
class Took:
    """Wall and CPU seconds, and the peak of the processes together as proportional set size."""

    wall_s: float
    cpu_s: float
    peak_gb: float


def vocabulary() -> list[str]:
    """Words of the standard library's sources, as often as they stand there."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words += re.findall(r"\S+\s*", path.read_text(errors="ignore"))
    return words


def write(path: Path, samples: int, words_each: int) -> None:
    """The chats: an answer three times as long as its question, all different."""
    words, rng = vocabulary(), random.Random(0)
    with open(path, "w") as file:
        for i in range(samples):
            at = rng.randrange(len(words) - words_each)
            text = words[at : at + words_each]
            cut = words_each // 4
            question, answer = f"{i} " + "".join(text[:cut]), "".join(text[cut:])
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def measured(args: list[str]) -> Took:
    """A draftsmith command in a process of its own, looked at twice a second."""
    begun, peak = time.perf_counter(), 0
    cpu_s: dict[int, float] = {}  # by process: the workers are no children of ours, to wait for
    process = psutil.Popen(
        [sys.executable, "-m", "draftsmith.cli", *args], stdout=subprocess.DEVNULL
    )
    while process.poll() is None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
                used = one.cpu_times()
            except psutil.Error:
                continue  # it ended meanwhile
            cpu_s[one.pid] = used.user + used.system
        peak = max(peak, total)
        time.sleep(0.5)
    assert process.returncode == 0, args
    return Took(time.perf_counter() - begun, sum(cpu_s.values()), peak / 1e9)


def texts_of(folder: Path, tokenizer: AutoTokenizer) -> Iterator[list[str]]:
    """The rendered chats, 4096 at a time."""
    for path in sorted(folder.glob("part-*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(4096):
            chats = [
                [*json.loads(row["messages"]), json.loads(row["answer"])]
                for row in batch.to_pylist()
            ]
            yield [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]


def raw(folder: Path, tokenizer: AutoTokenizer) -> Took:
    """`encode_batch` alone, over all cores; reading and rendering are not counted."""
    wall = cpu = 0.0
    for texts in texts_of(folder, tokenizer):
        wall0, cpu0 = time.perf_counter(), time.process_time()
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        wall, cpu = wall + time.perf_counter() - wall0, cpu + time.process_time() - cpu0
    return Took(wall, cpu, 0.0)


def report(prepared: Took, alone: list[Took], ours: list[Took], counts: dict) -> dict:
    """What is printed. Ratios are of rates: the tokenizer's seconds over ours, pair by pair."""
    pairs = list(zip(alone, ours, strict=True))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "samples": counts["train"] + counts.get("held_out", 0),
        "tokens": counts["tokens"],
        "prepare_s": round(prepared.wall_s, 1),
        "prepare_cpu_s": round(prepared.cpu_s, 1),
        "prepare_peak_gb": round(prepared.peak_gb, 2),
        "encode_batch_s": [round(took.wall_s, 1) for took in alone],
        "encode_batch_cpu_s": [round(took.cpu_s, 1) for took in alone],
        "tokenize_s": [round(took.wall_s, 1) for took in ours],
        "tokenize_cpu_s": [round(took.cpu_s, 1) for took in ours],
        "tokenize_peak_gb": round(max(took.peak_gb for took in ours), 2),
        "ratio_wall": [round(a.wall_s / b.wall_s, 3) for a, b in pairs],
        "ratio_cpu": [round(a.cpu_s / b.cpu_s, 3) for a, b in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument(
        "--words", type=int, default=340, help="in each chat; 340 are about 1,000 tokens"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target", default=str(BUILTIN))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    data, path, run = args.work / "chats.jsonl", args.work / "config.yaml", args.work / "run"
    if not data.exists():
        write(data, args.samples, args.words)
    config = {
        "run": str(run),
        "target": {"model": args.target, "device": "cpu"},
        "prepare": {"sources": [{"path": str(data)}]},
        "regenerate": {"enabled": False},
        "tokenize": {"template_kwargs": {}},
    }
    path.write_text(yaml.safe_dump(config))
    prepared = measured(["prepare", str(path)])
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    alone, ours = [], []
    for _ in range(args.repeats):
        shutil.rmtree(run / "data" / "tokens", ignore_errors=True)
        alone.append(raw(run / "data" / "conversations", tokenizer))
        ours.append(measured(["tokenize", str(path)]))
    counts = json.loads((run / "data/tokens/manifest.json").read_text())["counts"]
    print(json.dumps(report(prepared, alone, ours, counts), indent=1))


if __name__ == "__main__":
    main()
