"""Who runs the workers of a stage: this process, processes of this machine (local.py), or the actors of a Ray
cluster (ray.py). docs/engines.md.

A stage hands over `work`, which loads a target and makes what its tasks ask for, and gets back what workers
say of it. Results never come back: a worker writes them where they belong. A task leaves the same result
however often it is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftsmith.config import RunConfig
from draftsmith.engines import local
from draftsmith.engines.local import Work
from draftsmith.target.load import device_of


@dataclass(frozen=True)
class Tasks:
    """Tasks by number, for `work(iterator of (number, load(number)), say, done)`. What workers say reaches
    `on_message`; the death of one, and its unfinished tasks, `on_loss`. `on_wait` is called while nothing can
    run yet. Of `folders`, local ones, every worker must see the same files.
    """

    stage: str
    work: Work
    numbers: list[int]
    load: Callable[[int], Any]
    on_message: Callable[[Any], None]
    on_loss: Callable[[str, list[int]], None]
    on_wait: Callable[[], None] = lambda: None
    folders: Sequence[str] = field(default=())


def run_tasks(
    cfg: RunConfig, tasks: Tasks, *, workers: int | Literal["auto"], gpu: bool = True
) -> None:
    """Until every task is done, by `workers` at most; each has a copy of the target, on
    `target.gpus_per_replica` GPUs unless `gpu` is False or the target runs on a CPU.
    """
    if cfg.engine.kind == "ray":
        from draftsmith.engines import ray

        ray.run_tasks(cfg, tasks, workers=workers, gpu=gpu)
        return
    gpus = local.gpus_of_workers(cfg, workers, gpu=gpu and device_of(cfg.target).type == "cuda")
    if len(gpus) == 1:
        todo = ((number, tasks.load(number)) for number in tasks.numbers)
        tasks.work(todo, tasks.on_message, lambda number: None)
        return
    local.run_tasks(
        tasks.work, tasks.numbers, load=tasks.load, gpus=gpus,
        on_message=tasks.on_message, on_loss=tasks.on_loss,
    )  # fmt: skip


def for_workers(cfg: RunConfig) -> RunConfig:
    """The configuration as a worker reads it, whatever folder it was started in."""

    def whole(path: str) -> str:
        return path if "://" in path else str(Path(path).expanduser().absolute())

    target = cfg.target
    if Path(target.model).expanduser().is_dir():
        target = target.model_copy(update={"model": whole(target.model)})
    extract = cfg.extract
    if extract.files is not None:
        files = extract.files.model_copy(update={"path": whole(extract.files.path)})
        extract = extract.model_copy(update={"files": files})
    features = cfg.features.model_copy(update={"store": whole(cfg.store)})
    parts = {"target": target, "extract": extract, "features": features, "run": whole(cfg.run)}
    return cfg.model_copy(update=parts)


def has_gpus(cfg: RunConfig) -> bool:
    """Whether workers run on GPUs. A driver that hands work to a cluster need not have one itself."""
    if cfg.engine.kind == "ray":
        return cfg.target.device != "cpu"
    return device_of(cfg.target).type == "cuda"
