"""Curves besides events.jsonl: TensorBoard's files in RUN/logs, Weights & Biases, Trackio."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.config import RunConfig
from draftsmith.core import UserError


class Loggers:
    """Each number of a step goes to each of `train.loggers`."""

    def __init__(self, cfg: RunConfig) -> None:
        opened = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
        self._all = [opened[name](cfg) for name in cfg.train.loggers]

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """At this step (from 1)."""
        for write, _ in self._all:
            write(step, numbers)

    def close(self) -> None:
        """Everything is written."""
        for _, end in self._all:
            end()


Opened = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


def _tensorboard(cfg: RunConfig) -> Opened:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(logdir=str(cfg.root / "logs" / "tensorboard"), flush_secs=10)

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(f"train/{name}", value, step)

    return write, writer.close


def _wandb(cfg: RunConfig) -> Opened:
    wandb = _imported("wandb")
    name = Path(cfg.run).name
    run = wandb.init(
        project="draftsmith", name=name, id=name, resume="allow", dir=str(cfg.root / "logs"),
        config=cfg.model_dump(mode="json"),
    )  # fmt: skip
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _trackio(cfg: RunConfig) -> Opened:
    trackio = _imported("trackio")
    trackio.init(
        project="draftsmith", name=Path(cfg.run).name, resume="allow",
        config=cfg.model_dump(mode="json"),
    )  # fmt: skip
    return lambda step, numbers: trackio.log(numbers, step=step), trackio.finish


def _imported(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise UserError(
            where="train.loggers",
            found=f"{name}, and no such package",
            expected="it installed",
            remedy=f"pip install 'draftsmith[{name}]', or leave it out.",
        ) from None
