"""The command line. `draftsmith --help` lists the commands; any config key can be set: `--train.lr
3e-4`.

Exit codes: 0 good, 1 failed or a fault found, 2 wrong use, 3 stalled, 4 stopped.
"""

import argparse
import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from draftsmith import options
from draftsmith.core import FaultFound, Stopped, UserError
from draftsmith.files import FULL
from draftsmith.signals import sigterm_unwinds

FORBIDDEN = (errno.EPERM, errno.EACCES, errno.EROFS)
GOOD, FAILED, WRONG_USE, STALLED, STOPPED = range(5)


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
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or Python would say so again at its end
        print("draftsmith: what read its output has ended", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno in FORBIDDEN and error.filename is not None:
            print(f"draftsmith: {error.filename}: {error.strerror}; it is no place to write in or read "
                  "from for this user. Choose another, or change its owner or mode.", file=sys.stderr)  # fmt: skip
            return WRONG_USE
        if error.errno not in FULL:
            raise
        with contextlib.suppress(OSError):  # it may be the disk of the log
            print(f"draftsmith: no space left on the disk ({error})", file=sys.stderr)
        return WRONG_USE
    except (Stopped, KeyboardInterrupt) as error:
        print(f"draftsmith: stopped ({str(error) or 'interrupted'})", file=sys.stderr)
        return STOPPED


def _dispatch(args: list[str]) -> int:
    parser = options.parser()
    known, rest = parser.parse_known_args(args)
    plain = {
        "serve-check": _serve_check, "verify": _verify, "inspect": _inspect, "bench": _bench, "status": _status,
        "stop": _stop, "watch": _watch, "export-features": _export_features,
    }  # fmt: skip
    if known.command in plain:
        _no_more(parser, rest)
        return plain[known.command](known)
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
    if known.command == "run" and cfg.supervise.enabled:
        return _run(cfg, [word for word in args if word != "--detach"], detach=known.detach)
    from draftsmith import pipeline

    pipeline.run(cfg, None if known.command == "run" else [known.command])
    return GOOD


def _run(cfg: Any, words: list[str], *, detach: bool) -> int:
    from draftsmith import background, supervise

    if supervise.is_worker():
        from draftsmith import pipeline

        supervise.begin_worker(cfg.root)
        pipeline.run(cfg)
        return GOOD
    return background.detach(cfg.root, words) if detach else supervise.run(cfg, words)


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
        nodes=known.nodes,
        price=known.price,
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


def _inspect(known: argparse.Namespace) -> int:
    from draftsmith import inspect

    inspect.run(
        known.data, sample=known.sample, ids=known.ids, page=known.html, picture=known.picture
    )
    return GOOD


def _bench(known: argparse.Namespace) -> int:
    if known.bench in ("extract", "train", "decode"):
        from draftsmith.bench import decode, extract, train

        options = {
            k: v for k, v in vars(known).items() if k not in ("command", "bench", "json", "help")
        }
        stages = {"extract": extract, "train": train, "decode": decode}
        stages[known.bench].run(**options, as_json=known.json)
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


def _one_config(command: str, paths: list[str]) -> UserError:
    return UserError(
        where="command line",
        found=" and ".join(map(repr, paths)) or "no configuration",
        expected=f"draftsmith {command} CONFIG [--section.key VALUE ...]",
        remedy="`draftsmith run --help` lists the keys.",
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


def _status(known: argparse.Namespace) -> int:
    from draftsmith.monitor import now

    state = now.read(known.run)
    print(json.dumps(state, indent=1) if known.json else now.line(state))
    return _code(state)


def _stop(known: argparse.Namespace) -> int:
    from draftsmith import background

    return background.stop(known.run)


def _export_features(known: argparse.Namespace) -> int:
    from draftsmith import export_features

    export_features.run(known.store, known.out, fp8=known.fp8)
    return GOOD


def _code(state: dict[str, Any]) -> int:
    return {"FAILED": FAILED, "STALLED": STALLED, "STOPPED": STOPPED}.get(state["state"], GOOD)


def _watch(known: argparse.Namespace) -> int:
    if known.web is None:
        from draftsmith.monitor import terminal

        return _code(terminal.watch(known.runs))
    from draftsmith.monitor import now, web

    for root in known.runs:
        now.read(root)  # no such run is told at once
    web.serve(known.runs, host=known.host, port=known.web)
    return GOOD


if __name__ == "__main__":
    sys.exit(main())
