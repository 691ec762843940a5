"""`draftsmith doctor CONFIG`: what will work on this machine, before any weight is loaded. A line each: ok,
warning or problem, and the remedy.

Reads the target's config.json and tokenizer, looks at GPUs, libraries, disks and S3. Exit 1 on a
problem.
"""

import importlib.util
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from draftsmith import places, train
from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.extract.plan import ENGINES, engine_of
from draftsmith.plan import Asked
from draftsmith.plan import make as make_plan
from draftsmith.prepare.records import HUB
from draftsmith.target.load import device_of, eos_ids, inspect_target, load_tokenizer
from draftsmith.target.packed import can_pack, has_kernels

Level = Literal["ok", "warning", "problem"]
OLDEST = {"torch": (2, 11), "transformers": (5, 24)}
SHARED_MEMORY = 1 << 30
EXTRACTORS: tuple[tuple[tuple[int, int], tuple[int, int], str], ...] = (
    ((0, 0), (0, 22), "refuses to start on hybrids (their KV cache groups cannot be kept apart)"),
    (
        (0, 22),
        (0, 24),
        "gives fewer states than tokens unless chunked prefill and prefix cache are off",
    ),
    ((0, 24), (0, 25), "starts and can write all-zero states without an error (vllm#46301)"),
)
"""vLLM's own extractor on hybrids: from version, before version, what it does. From 0.25 on it works."""


@dataclass(frozen=True)
class Line:
    """A finding."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def run(cfg: RunConfig, *, as_json: bool) -> bool:
    """Print the findings; whether there is no problem."""
    lines = examine(cfg)
    print(json.dumps([asdict(line) for line in lines], indent=1) if as_json else _table(lines))
    return all(line.level != "problem" for line in lines)


def examine(cfg: RunConfig) -> list[Line]:
    """All findings. A check that cannot go on because of a mistake is a problem, and the rest go on."""
    checks: list[tuple[str, Callable[[RunConfig], Iterator[Line]]]] = [
        ("libraries", _libraries), ("GPUs", _gpus), ("target", _target), ("kernels", _kernels),
        ("tokenizer", _tokenizer), ("drafter", _drafter), ("sources", _sources), ("run", _folder),
        ("plan", _plan), ("S3", _s3), ("other extractors", _extractors), ("ports", _ports),
    ]  # fmt: skip
    lines: list[Line] = []
    for name, check in checks:
        try:
            lines += check(cfg)
        except UserError as error:
            lines.append(Line(name, "problem", str(error)))
    return lines


def _libraries(cfg: RunConfig) -> Iterator[Line]:
    for name, oldest in OLDEST.items():
        have = version(name)
        old = _numbers(have) < oldest
        wanted = ".".join(map(str, oldest))
        remedy = f"pip install '{name}>={wanted}'" if old else ""
        yield Line(name, "problem" if old else "ok", have, remedy)
    if torch.cuda.is_available():
        yield Line("CUDA", "ok", f"{torch.version.cuda}, driver answers")


def _gpus(cfg: RunConfig) -> Iterator[Line]:
    if device_of(cfg.target).type == "cpu":
        yield Line(
            "GPUs", "warning", "none: everything runs on the CPU",
            "Fine for small models; check the driver with nvidia-smi if there should be one.",
        )  # fmt: skip
        return
    count, need = torch.cuda.device_count(), cfg.target.gpus_per_replica
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    sizes = [torch.cuda.mem_get_info(i) for i in range(count)]
    free = min(left for left, _ in sizes)
    text = f"{count} x {', '.join(sorted(names))}, at least {free / 2**30:.0f} GiB free"
    busy = any(left < 0.9 * total for left, total in sizes)
    yield Line(
        "GPUs", "warning" if busy else "ok", text,
        "Another process holds memory there: nvidia-smi names it." if busy else "",
    )  # fmt: skip
    if need > count:
        yield Line(
            "gpus_per_replica",
            "problem",
            f"{need}, and {count} GPUs here",
            "Lower it, or use more GPUs.",
        )
    if torch.cuda.get_device_capability()[0] < 8 and cfg.target.dtype == "bfloat16":
        yield Line("bfloat16", "problem", "GPUs older than Ampere compute none", "Use newer ones.")


def _target(cfg: RunConfig) -> Iterator[Line]:
    info = inspect_target(cfg.target)
    yield Line(
        "target", "ok", f"{info.name}: {info.model_type}, {info.num_layers} layers, hidden "
        f"{info.hidden_size}, vocabulary {info.vocab_size:,}",
    )  # fmt: skip


def _kernels(cfg: RunConfig) -> Iterator[Line]:
    info = inspect_target(cfg.target)
    engine = engine_of(cfg, info, places.at(cfg.store))
    if device_of(cfg.target).type == "cpu":
        if importlib.util.find_spec("fla") is not None:
            yield Line(
                "kernels", "problem", "flash-linear-attention is installed, and the target is on the CPU: "
                "Transformers would call its kernels on CPU tensors", "pip uninstall fla-core",
            )  # fmt: skip
        return
    if can_pack(info.model_type) and not has_kernels(info.model_type):
        yield Line(
            "kernels", "warning", f"no flash-linear-attention: {info.model_type} runs in right-padded "
            "batches with Transformers' own recurrence, right but several times slower",
            "pip install 'draftsmith[gpu]'",
        )  # fmt: skip
    else:
        packed = engine == ENGINES["packed"]
        yield Line("kernels", "ok", "packed rows" if packed else "length-bucketed padded batches")
    if importlib.util.find_spec("triton") is None:
        yield Line(
            "triton", "problem", "missing: FlexAttention and the compiled losses need it",
            "Install torch's CUDA build.",
        )  # fmt: skip


def _tokenizer(cfg: RunConfig) -> Iterator[Line]:
    tokenizer = load_tokenizer(cfg.target)
    kwargs, asked = cfg.tokenize.template_kwargs, [{"role": "user", "content": "Hello"}]
    try:
        prompt = tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, **kwargs
        )
    except Exception as error:  # whatever a template raises
        yield Line("chat template", "problem", f"cannot render a question ({error})", "Mend it.")
        return
    text = str(prompt)
    yield Line("chat template", "ok", f"a prompt ends with {text[-40:]!r}")
    ends = eos_ids(tokenizer, cfg.target)
    yield Line("end of turn", "ok", ", ".join(repr(tokenizer.decode([i])) for i in ends))
    ignored = [k for k in kwargs if k not in str(tokenizer.chat_template)]
    if ignored:
        yield Line(
            "template_kwargs", "warning", f"{', '.join(ignored)}: the template does not read it",
            "Leave it out of tokenize.template_kwargs, or check its name.",
        )  # fmt: skip


def _drafter(cfg: RunConfig) -> Iterator[Line]:
    shape = train.drafter_shape(cfg)
    yield Line(
        "drafter", "ok", f"taps {list(shape.taps)}, {shape.num_layers} layers, block "
        f"{shape.block_size}, mask token {shape.mask_token_id}",
    )  # fmt: skip


def _sources(cfg: RunConfig) -> Iterator[Line]:
    for source in cfg.prepare.sources:
        if source.path.startswith(HUB):
            missing = importlib.util.find_spec("datasets") is None
            yield Line(
                source.path, "problem" if missing else "ok",
                "a hub data set, and no `datasets`" if missing else "a hub data set",
                "pip install 'draftsmith[hub]'" if missing else "",
            )  # fmt: skip
        elif not Path(source.path).expanduser().exists():
            yield Line(source.path, "problem", "no such file", "Check prepare.sources.")
        else:
            size = Path(source.path).expanduser().stat().st_size
            yield Line(source.path, "ok", f"{size / 1e6:,.1f} MB")


def _folder(cfg: RunConfig) -> Iterator[Line]:
    near = cfg.root.absolute()
    while not near.exists():
        near = near.parent
    try:
        tempfile.TemporaryFile(dir=near).close()  # root may write anywhere, by its mode
    except OSError as error:
        said = f"{near} is no folder to write in ({error.strerror})"
        yield Line("run", "problem", said, "Choose another `run:`.")
    shared = Path("/dev/shm")
    if shared.exists() and (free := shutil.disk_usage(shared).free) < SHARED_MEMORY:
        yield Line(
            "/dev/shm", "warning", f"{free / 1e6:.0f} MB free: NCCL and data workers share memory there",
            "In a container: --shm-size=16g, or --ipc=host.",
        )  # fmt: skip


def _plan(cfg: RunConfig) -> Iterator[Line]:
    """Disk and GPU memory, as `draftsmith plan` finds them."""
    try:
        plan = make_plan(cfg, Asked())
    except UserError as error:
        yield Line("plan", "warning", f"not known yet: {error}")
        return
    source = plan["source"]
    yield Line("features", "ok", f"{source['source']}, because {source['reason']}")
    kept = plan["checkpoints"]
    yield Line(
        "checkpoints", "ok" if kept["fits"] else "problem",
        f"{kept['bytes'] / 1e9:.3g} GB at most, {kept['one'] / 1e9:.3g} each; {kept['free'] / 1e9:.3g} GB free "
        f"at {kept['place']}",
        "" if kept["fits"] else "Choose a `run:` on a larger disk, or fewer train.keep_checkpoints.",
    )  # fmt: skip
    for stage in plan["stages"]:
        if stage["taken"] and not stage["fits"]:
            yield Line(
                stage["name"], "problem",
                f"needs {stage['memory_bytes'] / 1e9:.0f} GB of a GPU's memory", stage["note"],
            )  # fmt: skip


def _s3(cfg: RunConfig) -> Iterator[Line]:
    """A tiny object put, read and deleted in each prefix."""
    for name, uri in (("features.store", cfg.store), ("mirror", cfg.mirror)):
        if uri is None or "://" not in uri:
            continue
        from draftsmith.bucket import Bucket

        bucket = Bucket(uri)
        key, text = f"doctor-{os.getpid()}-{time.time_ns()}", b"draftsmith doctor"
        try:
            bucket.replace(key, text)
            read = bucket.read(key)
            bucket.delete([key])
        except UserError as error:
            yield Line(name, "problem", str(error))
            continue
        same = read == text
        yield Line(
            name, "ok" if same else "problem",
            f"{uri}: put, read and deleted" if same else f"{uri} returned another text",
        )  # fmt: skip


def _extractors(cfg: RunConfig) -> Iterator[Line]:
    """Of other tools installed here: what is known of their extractors on this architecture."""
    info = inspect_target(cfg.target)
    if not can_pack(info.model_type):
        return
    try:
        have = version("vllm")
    except PackageNotFoundError:
        return
    said = [text for low, high, text in EXTRACTORS if low <= _numbers(have) < high]
    yield Line(
        f"vLLM {have}", "warning" if said else "ok",
        f"its extractor {said[0]}" if said else "serves, and its extractor is known to work here",
        "Extract with draftsmith; `draftsmith verify STORE` finds such files." if said else "",
    )  # fmt: skip


def _ports(cfg: RunConfig) -> Iterator[Line]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Line(
            "ports", "problem", f"none can be bound on 127.0.0.1 ({error.strerror}), and processes "
            "find each other there", "Allow it for this container.",
        )  # fmt: skip
        return
    yield Line("ports", "ok", "127.0.0.1 gives one")


def _numbers(text: str) -> tuple[int, int]:
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _table(lines: list[Line]) -> str:
    grid = Table(show_header=False)
    for line in lines:
        text = line.found if not line.remedy else f"{line.found}. {line.remedy}"
        grid.add_row(line.level, line.name, text)
    console = Console(width=120)
    with console.capture() as out:
        console.print(grid)
    return out.get()
