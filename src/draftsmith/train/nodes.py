"""A training on several machines: what must be the same on all of them is compared before anything is read."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith import __version__
from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.ranks import Ranks
from draftsmith.shared import marked, unseen


def check(cfg: RunConfig, ranks: Ranks) -> None:
    """The run's folder, and a store in a local folder, are one for all; packages are of one version; nodes have
    as many processes each. Raises UserError, the same on every rank, naming machines.
    """
    if ranks.count == ranks.per_node:
        return
    folders = [cfg.root, Path(cfg.store)] if "://" not in cfg.store else [cfg.root]
    # with a budget each rank fills a store there, which the others read
    keeps = cfg.features.max_bytes is not None
    there = [keeps or folder.is_dir() for folder in folders]
    mine = [str(folder) for folder, looked_at in zip(folders, there, strict=True) if looked_at]
    with marked(mine) if ranks.lead else contextlib.nullcontext([]) as marks:
        names = json.loads(ranks.share(json.dumps(_by_folder(folders, marks))))
        here = [str(folders[int(i)].absolute() / name) for i, name in names.items()]
        everyone = ranks.gather(
            {"host": socket.gethostname(), "unseen": unseen(here), **_mine(ranks)}
        )
    lead = everyone[0]
    for one in everyone:
        if one["unseen"]:
            raise _not_shared(one["unseen"][0], one["host"], lead["host"])
        for name, value in lead.items():
            if name not in ("host", "unseen") and one[name] != value:
                raise UserError(
                    where="torchrun",
                    found=f"{name} {value} on {lead['host']}, {one[name]} on {one['host']}",
                    expected="the same on every node",
                    remedy="Start the same environment and --nproc-per-node everywhere.",
                )


def _by_folder(folders: list[Path], marks: list[str]) -> dict[int, str]:
    """Which of the folders has a mark of which name: every node looks into its own."""
    places = [folder.absolute() for folder in folders]
    return {places.index(Path(mark).parent): Path(mark).name for mark in marks}


def _mine(ranks: Ranks) -> dict[str, Any]:
    return {
        "draftsmith": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processes a node": ranks.per_node,
    }


def _not_shared(folder: str, host: str, lead: str) -> UserError:
    return UserError(
        where=folder,
        found=f"a folder of {lead} that {host} does not see",
        expected="a run's folder, and features.store, that every node shares",
        remedy="Put `run:` on a shared file system, and features.store there or on s3://.",
    )
