"""The command line. `draftsmith --help` lists the commands; any config key can be set: `--train.lr
3e-4`.

Exit codes: 0 good, 1 failed or a fault found, 2 wrong use, 3 stalled, 4 stopped.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from draftsmith import __version__
from draftsmith.core import FaultFound, Stopped, UserError
from draftsmith.signals import sigterm_unwinds

GOOD, FAILED, WRONG_USE, STALLED, STOPPED = range(5)
STAGES = {
    "prepare": "read conversations, drop duplicates, split by prompt",
    "regenerate": "replace answers by the target's own",
    "tokenize": "chat template and loss mask",
    "extract": "the target's states at the taps, into the store",
    "train": "train the drafter",
    "evaluate": "measure acceptance on held-out prompts",
    "export": "write the checkpoint that vLLM and SGLang load",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    args = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        with sigterm_unwinds():
            return _dispatch(args)
    except UserError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return WRONG_USE
    except FaultFound as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return FAILED
    except (Stopped, KeyboardInterrupt) as error:
        print(f"draftsmith: stopped ({error or 'interrupted'})", file=sys.stderr)
        return STOPPED


def _dispatch(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="draftsmith", description="Make and prove a DFlash drafter for a language model."
    )
    parser.add_argument("--version", action="version", version=f"draftsmith {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="the whole pipeline on the built-in tiny hybrid, on a CPU, in minutes"
    )
    demo.add_argument("--run", default="runs/demo", help="the run's folder (default: runs/demo)")
    for name, text in {"run": "all stages, finished ones skipped", **STAGES}.items():
        stage = commands.add_parser(name, help=text, add_help=False)
        stage.add_argument("-h", "--help", action="store_true")
    status = commands.add_parser("status", help="one line: state, stage, progress, ETA")
    status.add_argument("run", type=Path, help="the run's folder")
    status.add_argument("--json", action="store_true", help="state.json, as it holds now")
    _add_plan(commands)
    doctor = commands.add_parser("doctor", help="what will work here, before weights are loaded")
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
    known, rest = parser.parse_known_args(args)
    if known.command == "serve-check":
        _no_more(parser, rest)
        return _serve_check(known)
    if known.command == "verify":
        _no_more(parser, rest)
        return _verify(known)
    if known.command == "inspect":
        _no_more(parser, rest)
        return _inspect(known)
    if known.command == "bench":
        _no_more(parser, rest)
        return _bench(known)
    if known.command == "status":
        _no_more(parser, rest)
        return _status(known.run, known.json)
    if known.command == "export-features":
        _no_more(parser, rest)
        from draftsmith import export_features

        export_features.run(known.store, known.out, fp8=known.fp8)
        return GOOD
    if known.command == "plan":
        return _plan(known, rest)
    if known.command == "doctor":
        return _doctor(known, rest)
    if known.command == "demo":
        from draftsmith import demo as demo_module

        paths, overrides = _split(rest)
        _no_more(parser, paths)
        return demo_module.run(known.run, overrides)
    paths, overrides = _split(rest)
    if known.help or (not paths and not overrides):
        return _config_help(known.command, asked=known.help)
    if len(paths) != 1:
        raise _one_config(known.command, paths)
    from draftsmith import configfile

    cfg = configfile.load(Path(paths[0]), overrides)  # a typo is told before torch is imported
    from draftsmith import pipeline

    pipeline.run(cfg, None if known.command == "run" else [known.command])
    return GOOD


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="bytes, hours and GPU memory of each stage, and the feature source that auto takes",
    )
    plan.add_argument(
        "--samples", type=_amount, metavar="N", help="such as 913K; default: the run's"
    )
    plan.add_argument("--tokens", type=_amount, metavar="N", help="of all samples, such as 913M")
    plan.add_argument("--gpus", type=_count, metavar="N", help="default: those here; 0: the CPU")
    plan.add_argument("--gpu-memory", type=_amount, metavar="BYTES", help="of one, such as 96GB")
    plan.add_argument("--disk", type=_amount, metavar="BYTES", help="free for features")
    plan.add_argument("--rates", type=Path, metavar="FILE", help="measured rates; docs/plan.md")
    plan.add_argument(
        "--target",
        metavar="NAME",
        help="a folder with its config.json, or the built-in qwen3.6-27b",
    )
    plan.add_argument("--json", action="store_true")


def _plan(known: argparse.Namespace, rest: list[str]) -> int:
    from draftsmith import configfile

    paths, overrides = _split(rest)
    if len(paths) != 1:
        raise _one_config("plan", paths)
    cfg = configfile.load(Path(paths[0]), overrides)
    from draftsmith import plan

    asked = plan.Asked(
        samples=known.samples,
        tokens=known.tokens,
        gpus=known.gpus,
        gpu_memory_bytes=known.gpu_memory,
        disk_bytes=known.disk,
        rates=known.rates,
        target=known.target,
    )
    plan.run(cfg, asked, as_json=known.json)
    return GOOD


def _doctor(known: argparse.Namespace, rest: list[str]) -> int:
    from draftsmith import configfile

    paths, overrides = _split(rest)
    if len(paths) != 1:
        raise _one_config("doctor", paths)
    cfg = configfile.load(Path(paths[0]), overrides)
    from draftsmith import doctor

    return GOOD if doctor.run(cfg, as_json=known.json) else FAILED


def _add_inspect(commands: Any) -> None:
    look = commands.add_parser("inspect", help="a sample with its supervised tokens, or a summary")
    look.add_argument("data", type=Path, help="a run, or a folder in it")
    look.add_argument("--sample", type=int, metavar="I", help="the sample at this place, from 0")
    look.add_argument("--ids", action="store_true", help="every token with its id")
    look.add_argument("--html", type=Path, metavar="PATH", help="also as a page")
    look.add_argument("--picture", type=Path, metavar="PATH", help="the summary as .png or .svg")


def _inspect(known: argparse.Namespace) -> int:
    from draftsmith import inspect

    inspect.run(
        known.data, sample=known.sample, ids=known.ids, page=known.html, picture=known.picture
    )
    return GOOD


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
    check.add_argument("--max-prompts", type=int, default=128)
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
    verify.add_argument("--samples", type=_count, default=32, help="for --engine")
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
    store.add_argument("--bytes", type=_count, default=2 << 30, help="of states, for each codec")
    store.add_argument("--hidden", type=_count, default=4096, help="width of synthetic states")
    store.add_argument("--taps", type=_count, default=5, help="of synthetic states")
    store.add_argument("--states", type=Path, metavar="SHARD", help="real states, codec none")
    store.add_argument("--repeats", type=_count, default=3, help="medians of so many rounds")
    store.add_argument("--rates", type=Path, metavar="FILE", help="also for `plan --rates`")
    store.add_argument("--json", action="store_true")
    extract = kinds.add_parser(
        "extract", help="a random target's features, beside its products alone"
    )
    extract.add_argument(
        "--model", default="qwen3.6-27b", help="built in, config.json, folder or id"
    )
    extract.add_argument("--taps", type=_count, nargs="*", help="0-based; default: auto")
    extract.add_argument("--median", type=_count, default=400, help="tokens of a sample")
    extract.add_argument("--sigma", type=float, default=0.8, help="of the lengths' logarithm")
    extract.add_argument("--longest", type=_count, default=8192, help="tokens of a sample")
    extract.add_argument("--row-tokens", type=_count, default=16384)
    extract.add_argument("--num-rows", type=_count, default=16)
    extract.add_argument("--rows", choices=["auto", "packed", "padded"], default="auto")
    extract.add_argument("--codec", choices=["none", "lossless", "fp8"], default="none")
    extract.add_argument("--folder", type=Path, default=Path(), help="where shards are written")
    extract.add_argument("--shard-bytes", type=_count, default=1 << 30)
    extract.add_argument("--memory-gib", type=float, help="cap of the GPU allocator")
    extract.add_argument("--json", action="store_true")
    train = kinds.add_parser("train", help="a drafter's step, beside its products alone")
    train.add_argument("--model", default="qwen3.6-27b", help="of the target, as for extract")
    train.add_argument("--layers", type=_count, default=5)
    train.add_argument("--block-size", type=_count, default=16)
    train.add_argument("--tokens", type=_count, default=4096, help="of a micro-batch")
    train.add_argument("--anchors", type=_count, default=512, help="of a micro-batch")
    train.add_argument("--accumulate", type=_count, default=1, help="micro-batches of a step")
    train.add_argument("--steps", type=_count, default=10)
    train.add_argument("--source", choices=["memory", "store", "live"], default="memory")
    train.add_argument("--folder", type=Path, default=Path(), help="for --source store")
    train.add_argument("--memory-gib", type=float, help="cap of the GPU allocator")
    train.add_argument("--recompute", action="store_true")
    train.add_argument("--json", action="store_true")


def _bench(known: argparse.Namespace) -> int:
    if known.bench in ("extract", "train"):
        from draftsmith.bench import extract, train

        options = {
            k: v for k, v in vars(known).items() if k not in ("command", "bench", "json", "help")
        }
        {"extract": extract, "train": train}[known.bench].run(**options, as_json=known.json)
        return GOOD
    from draftsmith.bench import store as bench_store

    bench_store.run(
        known.folder,
        num_bytes=known.bytes,
        hidden=known.hidden,
        taps=known.taps,
        states=known.states,
        repeats=known.repeats,
        rates=known.rates,
        as_json=known.json,
    )
    return GOOD


def _serve_check(known: argparse.Namespace) -> int:
    from draftsmith import serve_check

    serve_check.run(
        known.export,
        server=known.server,
        command=known.server_command,
        baseline=known.baseline,
        max_prompts=known.max_prompts,
        wait_s=known.wait,
        as_json=known.json,
    )
    return GOOD


def _verify(known: argparse.Namespace) -> int:
    if (known.engine is None) != (known.server_command is None):
        raise UserError(
            where="command line",
            found="one of --engine and --command",
            expected="both, or neither",
            remedy="--command starts the server that --engine names.",
        )
    if known.engine is None:
        from draftsmith import check_store

        check_store.run(
            known.store,
            recomputed=known.recompute,
            data=known.data,
            target=known.target,
            as_json=known.json,
        )
        return GOOD
    from draftsmith import verify

    local = "://" not in known.store
    verify.run(
        known.store,
        command=known.server_command,
        num_samples=known.samples,
        wait_s=known.wait,
        log=(Path(known.store).parent if local else Path()) / "serve" / "verify.log",
        as_json=known.json,
    )
    return GOOD


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count")
    return int(text)


def _amount(text: str) -> int:
    """A count or a size: 913K, 1.5e9, 96GB."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([kMGBT]?)B?", text.replace("K", "k"))
    try:
        assert found is not None and float(found[1]) > 0, "not an amount"
    except (AssertionError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 913K or 96GB") from None
    powers = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
    return round(float(found[1]) * powers[found[2]])


def _one_config(command: str, paths: list[str]) -> UserError:
    return UserError(
        where="command line",
        found=" and ".join(map(repr, paths)) or "no configuration",
        expected=f"draftsmith {command} CONFIG [--section.key VALUE ...]",
        remedy=f"`draftsmith {command} --help` lists the keys.",
    )


def _no_more(parser: argparse.ArgumentParser, rest: list[str]) -> None:
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")


def _split(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Paths, and --a.b VALUE or --a.b=VALUE as {"a.b": value}, in any order; values are YAML."""
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    rest = list(args)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not key.startswith("--"):
            paths.append(key + equals + value)
            continue
        if not equals and not rest:
            raise UserError(
                where="command line",
                found=f"{key} without a value",
                expected="--section.key VALUE",
                remedy="`draftsmith COMMAND --help` lists the keys.",
            )
        text = value if equals else rest.pop(0)
        try:
            overrides[key[2:]] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(
                where=key,
                found=repr(text),
                expected="a YAML value",
                remedy="Check brackets and quotes.",
            ) from None
    return paths, overrides


def _config_help(command: str, *, asked: bool) -> int:
    from draftsmith import configfile

    print(f"usage: draftsmith {command} CONFIG [--section.key VALUE ...]\n\nKeys, with defaults:\n")
    print("\n".join(configfile.describe()))
    return GOOD if asked else WRONG_USE


def _status(root: Path, as_json: bool) -> int:
    from draftsmith.monitor import state

    now = state.read(root)
    print(json.dumps(now, indent=1) if as_json else state.line(now))
    return {"FAILED": FAILED, "STALLED": STALLED, "STOPPED": STOPPED}.get(now["state"], GOOD)


if __name__ == "__main__":
    sys.exit(main())
