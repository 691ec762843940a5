"""The same work on 1, 2, 4 ... GPUs of one machine, measured beside what `draftsmith plan` predicts.

    python recipes/rehearsal/scaling.py OUT --model qwen3.6-27b --gpus 1 2 4 --config recipes/rehearsal/27b.yaml \\
        --store /dev/shm/features --conversations 400 --tokens 1000     # random weights, synthetic texts
    python recipes/rehearsal/scaling.py OUT --gpus 1 2 --config recipes/rehearsal/tiny.yaml      # anywhere: CPU ranks

For each number of GPUs: `extract` by the local engine into a store of its own, a shard a row, and `train` from a
live source with FSDP2 and with DDP, the same tokens a step however many share them. Rates leave starts out:
extraction counts the shards written between the first of every worker and the last; training is all
steps after the first ten. `--beside` measures on unlike GPUs at the same time where there are enough (1, 1 and 2 of
4, say): less time, and cores and memory shared. Prints a table and writes OUT/scaling.json. What is measured is kept:
the command goes on where it was stopped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from make import filled_in

from draftsmith import places
from draftsmith.store.shards import open_shard

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "src/draftsmith/assets/tiny-hybrid"
COMMAND = [sys.executable, "-m", "draftsmith.cli"]
WORK = ("extract", "fsdp", "ddp")


def main() -> None:
    """Make the run's data once, then measure what is asked."""
    args = _arguments()
    make = HERE / "make.py"
    subprocess.run(
        [sys.executable, make, args.out, "--model", args.model, "--conversations", str(args.conversations),
         "--tokens", str(args.tokens)], check=True,
    )  # fmt: skip
    config = _config(args)
    for stage in ("prepare", "tokenize"):
        subprocess.run([*COMMAND, stage, config], check=True)
    for wave in waves(jobs(args), max(args.gpus) if args.beside else 0):
        with ThreadPoolExecutor(len(wave)) as threads:
            list(threads.map(lambda job: measure(args, *job), wave))
    rates = {
        what: {str(count): json.loads(kept(args, what, count).read_text()) for count in args.gpus}
        for what in args.what
    }
    said = {
        "machine": _machine(),
        "torch": torch.__version__,
        "model": args.model,
        "tokens_per_s": rates,
    }
    (args.out / "scaling.json").write_text(json.dumps(said, indent=1) + "\n")
    print(_table(said, predicted(config, args)))


def kept(args: argparse.Namespace, what: str, count: int) -> Path:
    """Where a rate is; one rank of training shares nothing, so FSDP2 and DDP are the same."""
    return args.out / f"{'train' if what != 'extract' and count == 1 else what}-{count}.json"


def jobs(args: argparse.Namespace) -> list[tuple[str, int]]:
    """What is to be measured yet: work and GPUs, the most GPUs first."""
    wanted = {kept(args, what, count): (what, count) for what in args.what for count in args.gpus}
    return sorted((job for path, job in wanted.items() if not path.exists()), key=lambda j: -j[1])


def waves(left: list[tuple[str, int]], gpus: int) -> list[list[tuple[str, int, int]]]:
    """Jobs that run at a time: work, GPUs, and the first of them."""
    out: list[list[tuple[str, int, int]]] = []
    taken: list[int] = []
    for what, count in left:
        fits = (k for k, used in enumerate(taken) if used + count <= gpus)
        k = next(fits, len(taken))
        if k == len(taken):
            out.append([])
            taken.append(0)
        out[k].append((what, count, taken[k]))
        taken[k] += count
    return out


def measure(args: argparse.Namespace, what: str, count: int, first: int) -> None:
    """A rate, kept."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if torch.cuda.is_available():
        named = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(args.gpus))))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(named.split(",")[first : first + count])
    rate = (extraction if what == "extract" else training)(args, what, count, env)
    kept(args, what, count).write_text(json.dumps(rate))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--config", type=Path, default=HERE / "tiny.yaml")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--what", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--store", type=Path, help="features go there; default OUT")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200)
    return parser.parse_args()


def _config(args: argparse.Namespace) -> Path:
    """The rehearsal's, with this machine's places."""
    config = filled_in(args.config, args.out)
    config["extract"]["shard_bytes"] = 1  # a row is a shard
    path = args.out / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def _run(
    args: argparse.Namespace, stage: str, name: str, env: dict[str, str], *options: str
) -> list[Any]:
    """A stage in a run of its own on the shared data; its events."""
    run = args.out / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    (run / "data").symlink_to((args.out / "run" / "data").absolute())
    subprocess.run(
        [*COMMAND, stage, args.out / "config.yaml", "--run", str(run), *options],
        env=env,
        check=True,
    )
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def extraction(args: argparse.Namespace, what: str, count: int, env: dict[str, str]) -> float:
    """Tokens/s between the moment when every worker has written a shard and the last shard."""
    store = (args.store or args.out).absolute() / f"features-{count}"
    shutil.rmtree(store, ignore_errors=True)
    events = _run(
        args, "extract", f"extract-{count}", env, "--features.source", "store", "--features.store",
        str(store), "--extract.workers", str(count),
    )  # fmt: skip
    shards = [(e["at"], e["name"]) for e in events if e["kind"] == "shard"]
    assert len(shards) > 2 * count, f"{len(shards)} shards are too few: more --conversations"
    place = places.at(str(store))
    tokens = [len(open_shard(place, name).small["input_ids"]) for _, name in shards]
    shutil.rmtree(store)
    return sum(tokens[count:]) / (shards[-1][0] - shards[count - 1][0])


def training(args: argparse.Namespace, what: str, count: int, env: dict[str, str]) -> float:
    """Tokens/s of the steps after ten: together, since a live target runs for several of them at a time."""
    events = _run(
        args, "train", f"{what}-{count}", env, "--features.source", "live", "--train.parallel", what,
        "--train.processes", str(count), "--train.max_steps", str(args.steps), "--train.log_every", "1",
        "--train.checkpoint_every", str(10 * args.steps), "--train.epochs", "1000",
    )  # fmt: skip
    shutil.rmtree(args.out / f"{what}-{count}" / "checkpoints")  # 20 GB at 27B
    late = [event for event in events if event["kind"] == "step"][10:]
    assert len(late) > 9, f"{len(late)} steps after ten are too few"
    tokens = sum(event["tokens"] for event in late)
    return tokens / sum(event["tokens"] / event["tokens_per_s"] for event in late)


def predicted(config: Path, args: argparse.Namespace) -> dict[int, float]:
    """Speed-ups of training by plan, for a workload so large that starts do not count."""
    out: dict[int, float] = {}
    for count in args.gpus:
        done = subprocess.run(
            [*COMMAND, "plan", config, "--samples", "913K", "--tokens", "913M", "--nodes", "1", "--gpus",
             str(count), "--gpu-memory", "141GB", "--disk", "1TB", "--json"],
            check=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        hours = [one for one in json.loads(done.stdout)["stages"] if one["name"] == "train (live)"]
        out[count] = hours[0]["hours"]
    return {count: out[args.gpus[0]] / hours for count, hours in out.items()}


def _machine() -> str:
    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _table(said: dict[str, Any], plan: dict[int, float]) -> str:
    lines = ["| work | GPUs | tokens/s | speed-up | predicted |", "|---|---|---|---|---|"]
    for what, rates in said["tokens_per_s"].items():
        first = next(iter(rates.values()))
        for count, rate in rates.items():
            of_plan = int(count) if what == "extract" else plan[int(count)]
            lines.append(f"| {what} | {count} | {rate:,.0f} | {rate / first:.2f} | {of_plan:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
