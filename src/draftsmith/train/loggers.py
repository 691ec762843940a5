"""Curves besides events.jsonl: TensorBoard's files in RUN/logs, Weights & Biases, Trackio."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.files import disk_errors

FLUSH_S = 10.0


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
    """Without SummaryWriter's thread: when that dies, of a full disk say, the training waits for it for ever."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

    messages: Any = (event_pb2, summary_pb2)  # protobuf makes their classes at run time
    Event, Summary = messages[0].Event, messages[1].Summary

    folder = cfg.root / "logs" / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder):
        writer = EventsWriter(str(folder / "events"))
    flushed = time.monotonic()

    def write(step: int, numbers: dict[str, float]) -> None:
        nonlocal flushed
        values = [Summary.Value(tag=f"train/{name}", simple_value=x) for name, x in numbers.items()]
        with disk_errors(folder):
            writer.write_event(
                Event(wall_time=time.time(), step=step, summary=Summary(value=values))
            )
            if time.monotonic() - flushed > FLUSH_S:
                writer.flush()
                flushed = time.monotonic()

    def close() -> None:
        with disk_errors(folder):
            writer.close()

    return write, close


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
