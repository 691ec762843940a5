"""The processes of one training: torchrun's ranks, or this process alone.

`draftsmith train` starts torchrun by itself for the GPUs of one machine. On several machines start it on each:
torchrun --nnodes N --nproc-per-node G --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m draftsmith.cli train
CONFIG (recipes/cluster).
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from draftsmith.core import FaultFound, Stopped, UserError
from draftsmith.files import write_json
from draftsmith.monitor.failures import ECHOES, first_cause
from draftsmith.monitor.state import LAUNCHED
from draftsmith.tether import tethered

LOG = "train.log"
KILLED = re.compile(r"exitcode: -(\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
LAST_S = 60
"""What a rank that is told to stop has for its last checkpoint, before torchrun ends it by SIGKILL."""
TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass(frozen=True)
class Ranks:
    """`rank` of `count`, `per_node` of them on each machine; the first leads: it reports, and writes what is
    written once.
    """

    rank: int = 0
    count: int = 1
    per_node: int = 1

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, value: str) -> str:
        """The lead's."""
        held = [value]
        if self.count > 1:
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Everyone's, by rank."""
        held = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(held, value)
        return held

    def barrier(self) -> None:
        """Wait for all."""
        if self.count > 1:
            dist.barrier()


def inside() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextlib.contextmanager
def joined(device: str, notes: Path) -> Iterator[Ranks]:
    """This process among its ranks, on a GPU of its own. An error of a rank that does not lead is
    left in `notes`, for launch() to tell.
    """
    if not inside():
        yield Ranks()
        return
    if device == "cuda":
        _check_gpus(notes)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    if ranks.lead:
        _forget(notes)
    try:
        yield ranks
    except Exception as error:
        if not isinstance(error, Stopped):
            _note(notes / f"rank-{ranks.rank}.json", error)
        raise
    dist.destroy_process_group()  # after an error NCCL's would wait for ranks that wait for this one


def _check_gpus(notes: Path) -> None:
    there, asked = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if asked > there:
        error = UserError(
            where="torchrun --nproc-per-node",
            found=f"{asked} processes on {socket.gethostname()}, which has {there} GPUs",
            expected="a GPU a process",
            remedy=f"Give --nproc-per-node {there} there, or show it more (CUDA_VISIBLE_DEVICES).",
        )
        _note(notes / f"rank-{os.environ['RANK']}.json", error)
        raise error


def _forget(notes: Path) -> None:
    for old in notes.glob("rank-*.json"):
        old.unlink(missing_ok=True)


def _note(path: Path, error: Exception) -> None:
    parts = error.parts if isinstance(error, UserError) else None
    cause = f"{type(error).__name__}: {error}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"at": time.time(), "cause": cause, "parts": parts})  # others read it at once


def launch(command: list[str], count: int, notes: Path) -> None:
    """Run this draftsmith command in `count` processes; what they and torchrun say on stderr goes to
    train.log in `notes`. Raises the first error in time, as the user's mistake where it is one.
    """
    notes.mkdir(parents=True, exist_ok=True)
    _forget(notes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={count}", "-m", "draftsmith.cli", *command]
    with open(notes / LOG, "ab") as log:
        begin = log.tell()
        env = {"OMP_NUM_THREADS": "1", TORCHRUN: str(LAST_S), **os.environ, LAUNCHED: "1"}
        process = subprocess.Popen(tethered(torchrun, LAST_S + 10), env=env, stderr=log)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # which torchrun hands on
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_S + 20)
        process.kill()
        raise
    if code != 0:
        _raise_first(notes, (notes / LOG).read_bytes()[begin:].decode(errors="replace"), code)


def _notes(notes: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What ranks left, in the order of time; and of these, what is no echo of another's end."""
    paths = notes.glob("rank-*.json")
    found = [{**json.loads(path.read_text()), "rank": path.stem[5:]} for path in paths]
    found.sort(key=lambda note: note["at"])
    return found, [note for note in found if note["parts"] or not ECHOES.search(note["cause"])]


def first_error(notes: Path) -> UserError | FaultFound | None:
    """Another rank's own error, which this one only felt. With launch() it is that which tells it."""
    own = [] if LAUNCHED in os.environ else _notes(notes)[1]
    return _error(own[0], notes) if own and own[0]["rank"] != "0" else None


def _error(note: dict[str, Any], notes: Path) -> UserError | FaultFound:
    if note["parts"]:
        return UserError(**note["parts"])
    return FaultFound(f"{note['cause']} (the whole error: {notes / LOG}, or its node's log)")


def _raise_first(notes: Path, said: str, code: int) -> NoReturn:
    """The first error in time. A rank that was killed leaves no note: the others' that it is gone are echoes."""
    found, own = _notes(notes)
    # by 15 torchrun ends the others
    killed = [end for end in KILLED.findall(said) if end[0] != "15"]
    if not own and killed:
        sign, rank, pid = killed[0]
        raise FaultFound(f"rank {rank}, process {pid}, died (signal {sign}; all: {notes / LOG})")
    if not found:
        cause = first_cause([said])
        line = cause.line if cause else f"a training process died without a word (code {code})"
        raise FaultFound(f"{line} (all of it: {notes / LOG})")
    raise _error((own or found)[0], notes)
