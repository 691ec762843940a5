"""The command line's commands and options. Imports nothing heavy: a typo is told at once."""

import argparse
import contextlib
import math
import re
from pathlib import Path
from typing import Any

from draftsmith import __version__

STAGES = {
    "prepare": "read conversations, drop duplicates, split by prompt",
    "regenerate": "replace answers by the target's own",
    "tokenize": "chat template and loss mask",
    "extract": "the target's states at the taps, into the store",
    "train": "train the drafter",
    "evaluate": "measure acceptance on held-out prompts",
    "export": "write the checkpoint that vLLM and SGLang load",
}

KEYS = "[--section.key VALUE ...]"
"""As `draftsmith run --help` lists them."""


def parser() -> argparse.ArgumentParser:
    """All commands and their options; a configuration's keys are left to configfile.py."""
    top = argparse.ArgumentParser(
        prog="draftsmith", description="Make and prove a DFlash drafter for a language model."
    )
    top.add_argument("--version", action="version", version=f"draftsmith {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        usage=f"draftsmith demo [--run FOLDER] {KEYS}",
        help="the whole pipeline on the built-in tiny hybrid, on a CPU, in minutes",
    )
    demo.add_argument("--run", default="runs/demo", help="the run's folder (default: runs/demo)")
    for name, text in {"run": "all stages, finished ones skipped", **STAGES}.items():
        stage = commands.add_parser(name, help=text, add_help=False, allow_abbrev=False)
        stage.add_argument("-h", "--help", action="store_true")
        if name == "run":
            stage.add_argument("--detach", action="store_true", help="return, and let it go on")
    stop = commands.add_parser("stop", help="end a run; the same command goes on from what it has")
    stop.add_argument("run", type=Path, help="the run's folder")
    status = commands.add_parser("status", help="one line: state, stage, progress, ETA")
    status.add_argument("run", type=Path, help="the run's folder")
    status.add_argument("--json", action="store_true", help="state.json, as it holds now")
    watch = commands.add_parser("watch", help="runs as they go on, here or as a page")
    watch.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    watch.add_argument("--web", type=int, metavar="PORT", help="as a page; 0: any free port")
    watch.add_argument("--host", default="127.0.0.1", help="for --web; others need a token")
    _add_plan(commands)
    doctor = commands.add_parser(
        "doctor",
        usage=f"draftsmith doctor CONFIG [--json] {KEYS}",
        help="what will work here, before weights are loaded",
    )
    doctor.add_argument("--json", action="store_true")
    _add_inspect(commands)
    _add_server_commands(commands)
    _add_bench(commands)
    export = commands.add_parser(
        "export-features", help="a feature store as the data folder of `speculators train`"
    )
    export.add_argument("store", help="RUN/features, a folder, or s3://bucket/prefix")
    export.add_argument("out", type=Path, help="a new folder")
    export.add_argument("--fp8", action="store_true", help="8-bit files, as hs-connectors writes")
    return top


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        usage=f"draftsmith plan CONFIG {KEYS} [options below]",
        allow_abbrev=False,
        help="bytes, hours and GPU memory of each stage, and the feature source that auto takes",
    )
    plan.add_argument(
        "--samples", type=_amount, metavar="N", help="such as 913K; default: the run's"
    )
    plan.add_argument("--tokens", type=_amount, metavar="N", help="of all samples, such as 913M")
    plan.add_argument("--gpus", type=_count, metavar="N", help="default: those here; 0: the CPU")
    plan.add_argument("--nodes", type=_some, metavar="N", help="of --gpus GPUs each")
    plan.add_argument("--price", type=_price, metavar="X", help="of a GPU for an hour")
    plan.add_argument("--gpu-memory", type=_amount, metavar="BYTES", help="of one, such as 96GB")
    plan.add_argument("--disk", type=_amount, metavar="BYTES", help="free for features")
    plan.add_argument("--rates", type=Path, metavar="FILE", help="measured rates; docs/plan.md")
    plan.add_argument(
        "--target",
        metavar="NAME",
        help="a folder with its config.json, or the built-in qwen3.6-27b",
    )
    plan.add_argument("--json", action="store_true")


def _add_inspect(commands: Any) -> None:
    look = commands.add_parser("inspect", help="a sample with its supervised tokens, or a summary")
    look.add_argument("data", type=Path, help="a run, or a folder in it")
    look.add_argument("--sample", type=int, metavar="I", help="the sample at this place, from 0")
    look.add_argument("--ids", action="store_true", help="every token with its id")
    look.add_argument("--html", type=Path, metavar="PATH", help="also as a page")
    look.add_argument("--picture", type=Path, metavar="PATH", help="the summary as .png or .svg")


def _add_server_commands(commands: Any) -> None:
    check = commands.add_parser(
        "serve-check", help="the held-out prompts through a real vLLM or SGLang, against evaluate"
    )
    check.add_argument("export", type=Path, help="RUN/export of an evaluated run")
    where = check.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", metavar="URL", help="a server that already runs with the drafter"
    )
    where.add_argument(
        "--command",
        dest="server_command",
        metavar="CMD",
        help="starts a server of the target, e.g. 'vllm serve TARGET'; drafter and port are added",
    )
    check.add_argument(
        "--baseline", metavar="mtp|PATH", help="also with the target's MTP or a drafter"
    )
    check.add_argument("--max-prompts", type=_some, default=128)
    verify = commands.add_parser(
        "verify", help="a feature store: checksums, impossible rows, states made again"
    )
    verify.add_argument("store", help="RUN/features, a folder, or s3://bucket/prefix")
    verify.add_argument(
        "--recompute", type=_count, default=0, metavar="N", help="samples to make again, alone"
    )
    verify.add_argument("--data", type=Path, metavar="RUN", help="the run whose tokens these are")
    verify.add_argument("--target", metavar="PATH", help="where the store's target is now")
    verify.add_argument(
        "--engine", choices=["vllm"], help="instead, against the states that a server extracts"
    )
    verify.add_argument("--command", dest="server_command", metavar="CMD", help="starts it")
    verify.add_argument("--samples", type=_some, default=32, help="for --engine")
    for command in (check, verify):
        command.add_argument(
            "--wait", type=float, default=900, help="seconds a server may take to start"
        )
        command.add_argument("--json", action="store_true")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="this machine against its own measured ceilings")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    store = kinds.add_parser("store", help="write and read rates for each codec")
    store.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    store.add_argument("--bytes", type=_some, default=2 << 30, help="of states, for each codec")
    store.add_argument("--hidden", type=_some, default=4096, help="width of synthetic states")
    store.add_argument("--taps", type=_some, default=5, help="of synthetic states")
    store.add_argument("--states", type=Path, metavar="SHARD", help="real states, codec none")
    store.add_argument("--repeats", type=_some, default=3, help="medians of so many rounds")
    store.add_argument("--rates", type=Path, metavar="FILE", help="also for `plan --rates`")
    store.add_argument("--json", action="store_true")
    extract = kinds.add_parser(
        "extract", help="a random target's features, beside its products alone"
    )
    extract.add_argument(
        "--model", default="qwen3.6-27b", help="built in, config.json, folder or id"
    )
    extract.add_argument("--taps", type=_count, nargs="*", help="0-based; default: auto")
    extract.add_argument("--median", type=_some, default=400, help="tokens of a sample")
    extract.add_argument("--sigma", type=float, default=0.8, help="of the lengths' logarithm")
    extract.add_argument("--longest", type=_some, default=8192, help="tokens of a sample")
    extract.add_argument("--row-tokens", type=_some, default=16384)
    extract.add_argument("--num-rows", type=_some, default=16)
    extract.add_argument("--rows", choices=["auto", "packed", "padded"], default="auto")
    extract.add_argument("--codec", choices=["none", "lossless", "fp8"], default="none")
    extract.add_argument("--folder", type=Path, default=Path(), help="where shards are written")
    extract.add_argument("--shard-bytes", type=_some, default=1 << 30)
    extract.add_argument("--memory-gib", type=float, help="cap of the GPU allocator")
    extract.add_argument("--json", action="store_true")
    decode = kinds.add_parser("decode", help="a round's cost, and speedups for given acceptance")
    decode.add_argument("--model", default="qwen3.6-27b", help="of the target, as for extract")
    decode.add_argument("--context", type=_count, default=2048, help="tokens before the rounds")
    decode.add_argument("--block-size", type=_count, default=16)
    decode.add_argument("--tree-nodes", type=_count, default=64, help="with the root")
    decode.add_argument("--layers", type=_count, default=5, help="of the drafter")
    decode.add_argument("--rounds", type=_count, default=20, help="medians of so many")
    decode.add_argument(
        "--survival", type=float, nargs="*", help="of slots 1, 2, ...: a curve of yours"
    )
    decode.add_argument("--tree-tau", type=float, help="of a tree of the same drafter")
    decode.add_argument("--memory-gib", type=float, help="cap of the GPU allocator")
    decode.add_argument("--json", action="store_true")
    train = kinds.add_parser("train", help="a drafter's step, beside its products alone")
    train.add_argument("--model", default="qwen3.6-27b", help="of the target, as for extract")
    train.add_argument("--layers", type=_some, default=5)
    train.add_argument("--block-size", type=_some, default=16)
    train.add_argument("--tokens", type=_some, default=4096, help="of a micro-batch")
    train.add_argument("--anchors", type=_some, default=512, help="of a micro-batch")
    train.add_argument("--accumulate", type=_some, default=1, help="micro-batches of a step")
    train.add_argument("--steps", type=_some, default=10)
    train.add_argument("--source", choices=["memory", "store", "live"], default="memory")
    train.add_argument("--folder", type=Path, default=Path(), help="for --source store")
    train.add_argument("--memory-gib", type=float, help="cap of the GPU allocator")
    train.add_argument("--recompute", action="store_true")
    train.add_argument("--json", action="store_true")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count")
    return int(text)


def _some(text: str) -> int:
    """A count of at least one."""
    count = _count(text)
    if count == 0:
        raise argparse.ArgumentTypeError("0 is none; expected 1 or more")
    return count


def _price(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no price such as 2.5")


def _amount(text: str) -> int:
    """A count or a size: 913K, 1.5e9, 96GB."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([kMGBT]?)B?", text.replace("K", "k"))
    try:
        assert found is not None and float(found[1]) > 0, "not an amount"
    except (AssertionError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 913K or 96GB") from None
    powers = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
    return round(float(found[1]) * powers[found[2]])
