"""Checkpoints: RUN/checkpoints/step-N appears whole, written in the background while training goes on.

model.safetensors and config.json are the drafter in z-lab's layout, fp32 master weights; optimizer/ is
AdamW's state by torch.distributed.checkpoint, so that another number of GPUs can go on from it.
"""

import json
import pickle
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map

from draftsmith import files
from draftsmith.core import UserError
from draftsmith.drafter.checkpoint import load_drafter, save_tensors
from draftsmith.drafter.model import DFlash
from draftsmith.ranks import Ranks

OPTIMIZER = "optimizer"
SUMS = "sums.json"
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def checkpoints(out: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in out.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


class Saver:
    """Writes one checkpoint at a time; the newest `keep` stay, and `best`."""

    def __init__(self, out: Path, ranks: Ranks, keep: int) -> None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process
        self._out, self._ranks, self._keep = out, ranks, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None
        # what the writers tell each other must not mix with the trainer's own
        self._group: Any = dist.new_group(backend="gloo") if ranks.count > 1 else None
        self.best: int | None = None

    def save(self, drafter: DFlash, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Begin to write step-N; the weights may change at once. Raises what went wrong with the one
        before.
        """
        self.wait()
        final = self._out / f"step-{step}"
        aside = Path(self._ranks.share(str(files.aside(final))))
        if self._ranks.lead:
            aside.mkdir(parents=True)
        self._ranks.barrier()
        whole: dict[str, Any] = get_model_state_dict(drafter, options=FULL)
        tensors = {name: x.detach().to("cpu", copy=True) for name, x in whole.items()}
        state = {"state": get_optimizer_state_dict(drafter, optimizer)["state"]}
        state = tree_map(_snapshot, state)
        with files.disk_errors(aside):
            written: Any = async_save(
                state,
                checkpoint_id=aside / OPTIMIZER,
                process_group=self._group,
                no_dist=self._group is None,
            )
        shape = drafter.shape

        def finish() -> None:
            with files.disk_errors(aside):
                written.result()
                if self._ranks.lead:
                    save_tensors(aside, tensors, shape, torch.float32)
                    files.write_json(aside / SUMS, _sums(aside))
                    files.publish_folder(aside, final)
                    self._prune()

        self._job = self._thread.submit(finish)

    def wait(self) -> None:
        """Until the last one is there. Raises what went wrong."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()

    def _prune(self) -> None:
        """Delete all but the newest, and the best."""
        for path in checkpoints(self._out)[: -self._keep]:
            if path.name != f"step-{self.best}":
                gone = path.rename(self._out / f".{path.name}.tmp")  # half-deleted, it looks whole
                shutil.rmtree(gone)


def _snapshot(value: Any) -> Any:
    """What lies on the CPU would be written while the optimizer changes it; from a GPU it is copied
    anyway.
    """
    return value.clone() if torch.is_tensor(value) and value.device.type == "cpu" else value


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name in the folder; but for torch's .metadata, a pickle that differs between equal
    checkpoints, and does not load when it is cut.
    """
    paths = sorted(p for p in folder.rglob("[!.]*") if p.is_file() and p.name != SUMS)
    with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
        sums = list(pool.map(files.file_digest, paths))
    return {str(path.relative_to(folder)): one for path, one in zip(paths, sums, strict=True)}


def check(folder: Path) -> None:
    """Refuse a checkpoint that is not as it was written; one of an older version has no sums. UserError."""
    if not (folder / SUMS).exists():
        return
    try:
        said = json.loads((folder / SUMS).read_text())
    except ValueError:
        said = {SUMS: ""}
    found = _sums(folder)
    wrong = sorted(name for name, one in said.items() if found.get(name) != one)
    if wrong:
        raise UserError(
            where=str(folder / wrong[0]),
            found="other bytes than training wrote"
            if wrong[0] in found
            else "no such file, or a damaged one",
            expected="the checkpoint as it was saved",
            remedy=_older(folder),
        )


def _older(damaged: Path) -> str:
    return f"Delete {damaged}; training goes on from the checkpoint before."


def resume(out: Path, drafter: DFlash, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; the step to go on from."""
    found = checkpoints(out)
    if not found:
        return 0
    newest = found[-1]
    if not dist.is_initialized() or dist.get_rank() == 0:
        check(newest)
    try:
        weights = load_drafter(newest).state_dict()
    except UserError as error:
        raise UserError(**{**error.parts, "remedy": _older(newest)}) from None
    set_model_state_dict(drafter, weights, options=StateDictOptions(full_state_dict=True))
    state = get_optimizer_state_dict(drafter, optimizer)
    try:
        if not (newest / OPTIMIZER / ".metadata").is_file():
            raise FileNotFoundError(newest / OPTIMIZER)
        alone = not dist.is_initialized()
        load({"state": state["state"]}, checkpoint_id=newest / OPTIMIZER, no_dist=alone)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError,
            CheckpointException) as error:  # fmt: skip
        raise UserError(
            where=str(newest / OPTIMIZER),
            found=f"no optimizer state ({type(error).__name__})",
            expected="what training saved",
            remedy=_older(newest),
        ) from error
    set_optimizer_state_dict(drafter, optimizer, state)
    return int(newest.name[5:])
