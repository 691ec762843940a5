"""`draftsmith plan CONFIG`: what the run will take, before anything starts: samples, tokens, bytes,
hours and memory of each stage, and the feature source that `auto` takes, with the reason.

Reads the target's config.json, never its weights. Formulas and constants: docs/plan.md.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.plan import estimate, rates, scale, show, sizes
from draftsmith.plan.estimate import Job, Machine, Stage
from draftsmith.plan.work import workload
from draftsmith.source import Choice, choose_source
from draftsmith.target.load import inspect_target
from draftsmith.target.taps import resolve_taps

TARGETS = Path(__file__).parent.parent / "assets" / "targets"


@dataclass(frozen=True)
class Asked:
    """What the command line gives; None: find out."""

    samples: int | None = None
    tokens: int | None = None
    gpus: int | None = None
    gpu_memory_bytes: float | None = None
    disk_bytes: float | None = None
    rates: Path | None = None
    target: str | None = None
    nodes: int | None = None
    price: float | None = None


def run(cfg: RunConfig, asked: Asked, *, as_json: bool) -> None:
    """Print the plan."""
    result = make(cfg, asked)
    print(json.dumps(result, indent=1) if as_json else show.text(result))


def make(cfg: RunConfig, asked: Asked) -> dict[str, Any]:
    """The plan as plain data."""
    cfg = _with_target(cfg, asked.target)
    job = _job(cfg, asked)
    stored = estimate.store_bytes(job)
    choice = decide(cfg, stored, job.machine.disk_bytes)
    stages = [estimate.extract(job), estimate.train(job, "store"), estimate.train(job, "live")]
    if cfg.regenerate.enabled:
        stages.insert(0, estimate.regenerate(job))
    stages.append(estimate.evaluate(job))
    room = job.machine.memory_bytes * estimate.USABLE
    taken = {"store": ("extract", "train (store)"), "live": ("train (live)",)}[choice.source]
    both = ("regenerate", "evaluate", *taken)
    lines: list[dict[str, Any]] = []
    if asked.nodes is not None:
        shape = scale.Shape(asked.nodes, job.machine.gpus // asked.nodes)
        lines = scale.table(job, choice.source, shape, asked.price)
        stages = [_scaled(stage, job, shape) for stage in stages]
    hours = sum(stage.hours for stage in stages if stage.name in both)
    return {
        "work": job.work.plain(),
        "machine": asdict(job.machine),
        "target": {
            "model": cfg.target.model,
            "params": job.target.params,
            "params_for_features": job.target.cut_params(job.depth),
            "layers": job.info.num_layers,
            "hidden_size": job.info.hidden_size,
            "taps": list(job.shape.taps),
        },
        "drafter": {"params": job.params, "block_size": job.shape.block_size},
        "store": {
            "place": cfg.store,
            "codec": cfg.extract.codec,
            "bytes": stored,
        },
        "checkpoints": _checkpoints(job, asked),
        "stages": [{**_told(stage, room), "taken": stage.name in both} for stage in stages],
        "hours": hours,
        "cost": None if asked.price is None else hours * job.machine.replicas * asked.price,
        "price": asked.price,
        "scaling": lines,
        "source": asdict(choice),
        "rates": estimate.plain(job.rates),
    }


def _told(stage: Stage, room: float) -> dict[str, Any]:
    """A stage as plain data; what to do where it does not fit, unless its note says that already."""
    fits = stage.memory_bytes <= room
    said = fits or stage.name.startswith("train")
    note = stage.note if said else "GPUs with more, or target.gpus_per_replica"
    return {**asdict(stage), "note": note, "fits": fits}


def _checkpoints(job: Job, asked: Asked) -> dict[str, Any]:
    """What training leaves in the run's folder: bytes of one and at most, those there already, and free
    bytes of its disk.
    """
    one, most = estimate.checkpoint_bytes(job)
    place = places.Folder(job.cfg.root)
    there = sum(f.stat().st_size for f in (job.cfg.root / "checkpoints").rglob("*") if f.is_file())
    free = place.free_bytes() if asked.disk_bytes is None else asked.disk_bytes
    kept = job.cfg.train.keep_checkpoints
    return {
        "place": str(job.cfg.root),
        "kept": kept,
        "one": one,
        "bytes": most,
        "there": there,
        "free": free,
        "fits": free is None or most - there <= free,
    }


def _scaled(stage: Stage, job: Job, shape: scale.Shape) -> Stage:
    """With what several nodes cost beside the work."""
    if stage.name == "extract":
        point = scale.extract(job, shape)
    elif stage.name.startswith("train"):
        point = scale.train(job, stage.name[7:-1], shape)
    else:
        return stage
    return replace(stage, hours=point.hours, note=stage.note or f"decided by {point.decides}")


def decide(cfg: RunConfig, stored: dict[str, int], room_bytes: float | None) -> Choice:
    """The source that this configuration takes."""
    if cfg.features.source != "auto":
        return Choice(cfg.features.source, "features.source says so")
    place = places.at(cfg.store)
    described = manifests.read(place) if isinstance(place, places.Folder) else None
    if described and described["complete"]:
        return Choice("store", f"there is a complete one at {cfg.store}")
    room = None if room_bytes is None else int(room_bytes)
    bound = cfg.features.max_bytes
    return choose_source(
        stored, cfg.extract.codec, room_bytes=room, place=cfg.store, max_bytes=bound
    )


def _with_target(cfg: RunConfig, target: str | None) -> RunConfig:
    """The configuration with another place of its target's config.json."""
    if target is None:
        return cfg
    model = str(TARGETS / target) if (TARGETS / target).is_dir() else target
    return cfg.model_copy(update={"target": cfg.target.model_copy(update={"model": model})})


def _job(cfg: RunConfig, asked: Asked) -> Job:
    info = inspect_target(cfg.target)
    shape = sizes.drafter_shape(cfg, info, resolve_taps(cfg.features, info.num_layers))
    layer_params, fuse_params = sizes.drafter_params(shape)
    machine, here = _machine(cfg, asked)
    return Job(
        cfg=cfg,
        info=info,
        target=sizes.target_sizes(cfg, getattr(torch, cfg.target.dtype).itemsize),
        shape=shape,
        layer_params=layer_params,
        fuse_params=fuse_params,
        work=workload(cfg, asked.samples, asked.tokens),
        machine=machine,
        rates=rates.gather(asked.rates, here=here),
    )


def _machine(cfg: RunConfig, asked: Asked) -> tuple[Machine, str | None]:
    """The machine that is planned for; and cuda or cpu when it is this one."""
    disk = asked.disk_bytes
    if disk is None:
        disk = places.at(cfg.store).free_bytes()
    if asked.nodes is not None and not asked.gpus:
        raise UserError(
            where="--nodes",
            found="no --gpus",
            expected="the GPUs of one node",
            remedy="Give both, such as --nodes 2 --gpus 8 --gpu-memory 141GB.",
        )
    if asked.gpus is not None:
        if asked.gpus and asked.gpu_memory_bytes is None:
            raise UserError(
                where="--gpus",
                found="no --gpu-memory",
                expected="a GPU's memory",
                remedy="Give both.",
            )
        if asked.gpu_memory_bytes is not None and asked.gpu_memory_bytes < 1e9:
            raise UserError(
                where="--gpu-memory",
                found=f"{asked.gpu_memory_bytes:,.0f} bytes",
                expected="a GPU's memory",
                remedy="Give it with its unit, such as --gpu-memory 96GB.",
            )
        memory = asked.gpu_memory_bytes or _memory_of_this_machine()
        nodes = asked.nodes or 1
        machine = Machine(asked.gpus * nodes, memory, disk, "given", nodes)
        return machine, None if asked.gpus else "cpu"
    found = [] if cfg.target.device == "cpu" else gpus_here()
    if found:
        memory = asked.gpu_memory_bytes or min(found)
        return Machine(len(found), memory, disk, "this machine"), "cuda"
    memory = asked.gpu_memory_bytes or _memory_of_this_machine()
    return Machine(0, memory, disk, "this machine, no GPU"), "cpu"


def gpus_here() -> list[int]:
    """Memory of each GPU that torch may use, in bytes."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(i).total_memory for i in range(count)]


def _memory_of_this_machine() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
