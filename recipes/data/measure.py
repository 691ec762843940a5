"""How fast prepare and tokenize are, beside the tokenizer alone on the same texts, and their peak memory.

    python recipes/data/measure.py WORK --samples 1000000

Synthetic chats of about 1k tokens, cut from the standard library's sources, with the built-in
target's tokenizer (or --target). Prints one JSON object.
"""

import argparse
import json
import os
import random
import re
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import yaml
from transformers import AutoTokenizer

import draftsmith

CONFIG = {"regenerate": {"enabled": False}, "tokenize": {"template_kwargs": {}}}


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


def measured(args: list[str]) -> tuple[float, float]:
    """(seconds, peak GB of the process and its workers together, as proportional set size)."""
    process = psutil.Popen([sys.executable, "-m", "draftsmith.cli", *args])
    peak, begun = 0.0, time.perf_counter()
    while process.poll() is None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.5)
    assert process.returncode == 0, args
    return time.perf_counter() - begun, peak / 1e9


def raw_rate(tokenizer, path: Path, samples: int) -> float:
    """Tokens a second of encode_batch over all cores, on the rendered texts."""
    backend, texts = tokenizer.backend_tokenizer, []
    for batch in pq.ParquetFile(path).iter_batches(samples):
        for row in batch.to_pylist():
            chat = [*json.loads(row["messages"]), json.loads(row["answer"])]
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
    tokens, begun = 0, time.perf_counter()
    for at in range(0, len(texts), 1024):
        encodings = backend.encode_batch(texts[at : at + 1024], add_special_tokens=False)
        tokens += sum(len(e.ids) for e in encodings)
    return tokens / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--words", type=int, default=200, help="in each chat")
    builtin = Path(draftsmith.__file__).parent / "assets" / "tiny-hybrid"
    parser.add_argument("--target", default=str(builtin))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    data, path = args.work / "chats.jsonl", args.work / "config.yaml"
    if not data.exists():
        write(data, args.samples, args.words)
    run = args.work / "run"
    target = {"model": args.target, "device": "cpu"}
    path.write_text(
        yaml.safe_dump(
            {
                "run": str(run),
                "target": target,
                "prepare": {"sources": [{"path": str(data)}]},
                **CONFIG,
            }
        )
    )
    prepared_s, prepare_gb = measured(["prepare", str(path)])
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    first = run / "data" / "conversations" / "part-00000.parquet"
    before = raw_rate(tokenizer, first, 8192)
    tokenized_s, tokenize_gb = measured(["tokenize", str(path)])
    raw = (before + raw_rate(tokenizer, first, 8192)) / 2
    counts = json.loads((run / "data/tokens/manifest.json").read_text())["counts"]
    rate = counts["tokens"] / tokenized_s
    print(
        json.dumps(
            {
                "cores": len(os.sched_getaffinity(0)),
                "samples": counts["train"] + counts.get("held_out", 0),
                "tokens": counts["tokens"],
                "prepare_s": round(prepared_s, 1),
                "prepare_peak_gb": round(prepare_gb, 2),
                "tokenize_s": round(tokenized_s, 1),
                "tokenize_peak_gb": round(tokenize_gb, 2),
                "tokens_per_s": round(rate),
                "encode_batch_tokens_per_s": round(raw),
                "ratio": round(rate / raw, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
