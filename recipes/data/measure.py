"""How fast prepare and tokenize are, their peak memory, and how much of the tokenizer's own rate is left.

    python recipes/data/measure.py WORK --samples 1000000

Synthetic chats of about 1k tokens, cut from the standard library's sources, with the built-in
target's tokenizer (or --target). Prints one JSON object: wall and CPU seconds of each stage (of all its
processes, and with the ten seconds that importing takes), the peak of their proportional set sizes
together, `ratio_wall`: the whole stage's rate, starting included, over `encode_batch`'s alone on all cores
for some of the same texts, by turns, and `ratio`: the rate of a worker of `tokenize` over that of
`encode_batch` (see `paired`).
"""

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import draftsmith
from draftsmith import configfile
from draftsmith.target.load import eos_ids, load_tokenizer
from draftsmith.tokenize import work
from draftsmith.tokenize.work import Job, Rules

LOOK_S, EVERY_S = 5.0, 60.0
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


def measured(args: list[str], raw: Callable[[], float] | None = None) -> tuple[Took, list[float]]:
    """A draftsmith command in a process of its own, looked at every few seconds (to look costs it time).
    With `raw`, it stands still every minute while that runs, so that both meet the same machine; the
    pauses do not count.
    """
    begun, peak, paused, found = time.perf_counter(), 0, 0.0, []
    cpu_s: dict[int, float] = {}  # by process: the workers are no children of ours, to wait for
    process = psutil.Popen(
        [sys.executable, "-m", "draftsmith.cli", *args], stdout=subprocess.DEVNULL
    )
    turn = time.perf_counter() + EVERY_S
    while process.poll() is None:
        total, all_ = 0, [process, *process.children(recursive=True)]
        for one in all_:
            try:
                total += one.memory_full_info().pss
                used = one.cpu_times()
            except psutil.Error:
                continue  # it ended meanwhile
            cpu_s[one.pid] = used.user + used.system
        peak = max(peak, total)
        if raw is not None and time.perf_counter() > turn:
            stopped = time.perf_counter()
            for one in all_:
                with contextlib.suppress(psutil.Error):
                    one.suspend()
            found.append(raw())
            for one in all_:
                with contextlib.suppress(psutil.Error):
                    one.resume()
            paused += time.perf_counter() - stopped
            turn = time.perf_counter() + EVERY_S
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(LOOK_S)
    assert process.returncode == 0, args
    wall = time.perf_counter() - begun - paused
    return Took(wall, sum(cpu_s.values()), peak / 1e9), found


def raw_rate(config: Path) -> Callable[[], float]:
    """Tokens a second, by the wall, of `encode_batch` alone on all cores for some of the chats."""
    cfg = configfile.load(config)
    tokenizer = load_tokenizer(cfg.target)
    texts = [
        text
        for _, some in some_texts(cfg.root / "data" / "conversations", tokenizer, 4)
        for text in some
    ]
    backend = tokenizer.backend_tokenizer
    tokens = sum(map(len, backend.encode_batch(texts, add_special_tokens=False)))

    def rate() -> float:
        begun = time.perf_counter()
        backend.encode_batch(texts, add_special_tokens=False)
        return tokens / (time.perf_counter() - begun)

    return rate


def paired(config: Path, rounds: int) -> list[float]:
    """The tokenizer's CPU seconds over those of a worker of `tokenize` for the same 1024 chats, reading
    and writing included: by turns in one process, so that a busy machine slows both alike.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a worker
    cfg = configfile.load(config)
    tokenizer = load_tokenizer(cfg.target)
    work.setup(Rules(cfg.target, cfg.tokenize, eos_ids(tokenizer, cfg.target), ["-"], False))
    job = Job(config.with_name("some.parquet"), config.with_name("tokens.parquet"))
    ratios = []
    for table, texts in some_texts(cfg.root / "data" / "conversations", tokenizer, rounds):
        pq.write_table(table, job.source)
        begun = time.process_time()
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        between = time.process_time()
        work.tokenize_part(job)
        ratios.append((between - begun) / (time.process_time() - between))
    return ratios


def some_texts(folder: Path, tokenizer: Any, rounds: int) -> Iterator[tuple[pa.Table, list[str]]]:
    """The first 1024 chats of each of the first parts, and rendered."""
    for path in sorted(folder.glob("part-*.parquet"))[:rounds]:
        table = pq.read_table(path).slice(0, 1024)
        chats = [
            [*json.loads(row["messages"]), json.loads(row["answer"])] for row in table.to_pylist()
        ]
        yield table, [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument(
        "--words", type=int, default=340, help="in each chat; 340 are about 1,000 tokens"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of the comparison")
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
    said: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "samples": args.samples}
    for stage in ("prepare", "tokenize"):
        raw = raw_rate(path) if stage == "tokenize" else None
        took, found = measured([stage, str(path)], raw)
        said |= {f"{stage}_{name}": round(value, 2) for name, value in asdict(took).items()}
    counts = json.loads((run / "data/tokens/manifest.json").read_text())["counts"]
    said["tokens_per_s"] = round(counts["tokens"] / said["tokenize_wall_s"])
    if found:
        raw = statistics.median(found)
        said |= {"raw_tokens_per_s": round(raw), "ratio_wall": round(said["tokens_per_s"] / raw, 3)}
    ratios = sorted(paired(path, args.rounds))
    said["ratio"] = {
        "median": round(statistics.median(ratios), 3),
        "all": [round(ratio, 3) for ratio in ratios],
    }
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
