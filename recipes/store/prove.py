"""Whether a store survives: written by `draftsmith extract` undisturbed, then again while it is killed
(kill -9) at random moments, and again on an S3 server that is killed; verified, and compared byte for byte.

    python recipes/store/prove.py WORK --bytes 10e9 --kills 20

The target is the built-in hybrid made wide, with random weights: real extraction, much state for little work.
WORK needs room for the store twice, with --s3 three times. Prints one JSON object; docs/store.md has results.
"""

import argparse
import filecmp
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import draftsmith

BUILTIN = Path(draftsmith.__file__).parent / "assets" / "tiny-hybrid"
TAPS, WIDTH, LENGTH = [0, 1, 2, 3, 4, 5, 6], 2048, 512
TOKEN_BYTES = len(TAPS) * WIDTH * 4
SHARDS = 40


def make_target(folder: Path) -> None:
    """The built-in hybrid's shape with wide states and random weights."""
    config = AutoConfig.from_pretrained(BUILTIN)
    config.hidden_size, config.intermediate_size = WIDTH, 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUILTIN / name, folder)


def make_chats(path: Path, num_tokens: int) -> None:
    """Chats of the standard library's sources, somewhat longer than a sample, all different."""
    words: list[str] = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words += re.findall(r"\S+\s*", source.read_text(errors="ignore"))
    rng = random.Random(0)
    with open(path, "w") as file:
        for i in range(-(-num_tokens // LENGTH)):
            at = rng.randrange(len(words) - LENGTH)
            text = "".join(words[at : at + LENGTH])
            chat = [
                {"role": "user", "content": f"{i}"},
                {"role": "assistant", "content": text},
            ]
            file.write(json.dumps({"messages": chat}) + "\n")


def make_config(work: Path, num_bytes: int) -> Path:
    """The run: answers as they are, one store of fp32 states."""
    make_target(work / "target")
    make_chats(work / "chats.jsonl", num_bytes // TOKEN_BYTES)
    config = {
        "run": str(work / "run"),
        "target": {"model": str(work / "target"), "dtype": "float32", "device": "cpu"},
        "prepare": {"sources": [{"path": str(work / "chats.jsonl")}]},
        "regenerate": {"enabled": False},
        "tokenize": {"max_length_tokens": LENGTH, "template_kwargs": {}},
        "features": {"taps": TAPS, "dtype": "float32"},
        "extract": {"tokens_per_batch": 4 * LENGTH, "shard_bytes": num_bytes // SHARDS},
    }
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(*args: object, log: Path) -> subprocess.Popen[bytes]:
    """A draftsmith command in a process of its own."""
    command = [sys.executable, "-m", "draftsmith.cli", *map(str, args)]
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def run(*args: object, log: Path) -> float:
    """The same to its good end; seconds."""
    begun = time.perf_counter()
    code = start(*args, log=log).wait()
    assert code == 0, f"{args} ended with {code}: {log.read_text()[-2000:]}"
    return time.perf_counter() - begun


def held(folder: Path) -> int:
    """Bytes there, what is not finished included."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # finished or deleted while we look
    return total


def wait_for_growth(folder: Path, rng: random.Random, total: int, left: int, process: Any) -> bool:
    """Wait until some more was written, `left` kills being still to come, and a moment. False when the
    process ends before.
    """
    begun = held(folder)
    goal = begun + rng.uniform(0.05, 1.5) * max(total - begun, 0) / (left + 1)
    while held(folder) <= goal:
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.5))
    return process.poll() is None


def killed_writer(config: Path, store: Path, total: int, kills: int, log: Path) -> dict[str, Any]:
    """Extract into `store`, killing the process `kills` times, and to the end."""
    rng, leftovers, begun = random.Random(1), 0, time.perf_counter()
    for left in range(kills, 0, -1):
        process = start("extract", config, "--features.store", store, log=log)
        assert wait_for_growth(store, rng, total, left, process), "it ended before it was killed"
        process.kill()
        process.wait()
        leftovers += any(path.name.endswith(".tmp") for path in store.iterdir())
    run("extract", config, "--features.store", store, log=log)
    return {
        "kills": kills,
        "kills_that_left_a_file_aside": leftovers,
        "seconds": round(time.perf_counter() - begun, 1),
    }


class Server:
    """localbucket, an S3 server on a folder, which keeps what it answered for when it is killed."""

    def __init__(self, folder: Path) -> None:
        (folder / "bkt").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        program = str(Path(sys.executable).parent / "localbucket")
        self._command = [program, "--port", str(port), str(folder)]
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        self.start()

    def start(self) -> None:
        """On the same port."""
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


def killed_server(config: Path, folder: Path, total: int, kills: int, log: Path) -> dict[str, Any]:
    """Extract onto S3 while the server is killed `kills` times, and back after one to three seconds."""
    rng, begun, server = random.Random(2), time.perf_counter(), Server(folder)
    try:
        process = start("extract", config, "--features.store", "s3://bkt/store", log=log)
        for left in range(kills, 0, -1):
            assert wait_for_growth(folder, rng, total, left, process), log.read_text()[-2000:]
            server.kill()
            time.sleep(rng.uniform(1, 3))
            server.start()
        assert process.wait() == 0, log.read_text()[-2000:]
        seconds = time.perf_counter() - begun
        run("verify", "s3://bkt/store", "--data", config.parent / "run", log=log)
    finally:
        server.kill()
    return {"kills": kills, "seconds": round(seconds, 1)}


def compare(one: Path, two: Path) -> int:
    """Number of files; both folders hold the same bytes. A server that was killed leaves some of its own."""
    names = sorted(path.name for path in one.iterdir())
    others = (path.name for path in two.iterdir() if not path.name.startswith(".localbucket-"))
    assert names == sorted(others), "other files"
    for name in names:
        assert filecmp.cmp(one / name, two / name, shallow=False), f"{name} differs"
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--bytes", type=float, default=2e8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--s3", action="store_true", help="also on a server that is killed")
    args = parser.parse_args()
    work, total, log = args.work.absolute(), int(args.bytes), args.work.absolute() / "log.txt"
    work.mkdir(parents=True)
    config = make_config(work, total)
    for stage in ("prepare", "tokenize"):
        run(stage, config, log=log)
    plain = work / "undisturbed"
    seconds = run("extract", config, "--features.store", plain, log=log)
    result: dict[str, Any] = {
        "bytes": held(plain),
        "undisturbed_seconds": round(seconds, 1),
        "local": killed_writer(config, work / "killed", total, args.kills, log),
    }
    run("verify", work / "killed", "--data", work / "run", log=log)
    result["local"]["files_identical"] = compare(plain, work / "killed")
    shutil.rmtree(work / "killed")
    if args.s3:
        result["s3"] = killed_server(config, work / "disk", total, args.kills, log)
        result["s3"]["files_identical"] = compare(plain, work / "disk" / "bkt" / "store")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
