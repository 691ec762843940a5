"""Why a Ray cluster, or a machine of it, cannot be used: found early, told in one message."""

import re
import socket
from collections.abc import Sequence
from typing import Any

from draftsmith import __version__
from draftsmith.core import UserError
from draftsmith.shared import unseen

REACH_S = 10.0


def imported() -> Any:
    """Ray, which is an extra."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.exceptions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            where="engine.kind",
            found=f"ray, which is not installed ({error})",
            expected="the extra of that name",
            remedy="pip install 'draftsmith[ray]', on every node.",
        ) from None
    return ray


def reach(address: str) -> None:
    """Ray itself tries for minutes."""
    found = re.fullmatch(r"(?:ray://)?([\w.-]+|\[[0-9a-f:]+\]):(\d+)", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), REACH_S).close()
    except OSError as error:
        raise UserError(
            where="engine.address",
            found=f"{address}, where nothing answers ({error})",
            expected="a Ray cluster's head",
            remedy="`ray start --head` prints its address (port 6379; with ray://, port 10001).",
        ) from None


def refused(address: str, error: Exception) -> UserError:
    """Why a cluster cannot be joined."""
    text = " ".join(str(error).split())
    expected, remedy = "a Ray cluster", "`ray status` on its head says how it is."
    if "ersion mismatch" in text:
        expected = "the same Python and Ray on the cluster as here"
        remedy = "Install one of the two anew; `python -V` and `ray --version` on both."
    elif "Could not find any running Ray" in text:
        remedy = (
            "Run this on a node of the cluster, after `ray start`; or leave out engine.address."
        )
    elif "Ray Client" in text or "ray[client]" in text or "grpc" in text:
        remedy = "pip install 'ray[client]' here, in the version of the cluster."
    elif "node_ip_address" in text or "No node" in text or "raylet" in text:
        expected = "a node of that cluster on this machine"
        remedy = "`ray start --address` here, or ray://HOST:10001 from outside the cluster."
    return UserError(
        where=f"engine.address: {address}", found=text[:300], expected=expected, remedy=remedy
    )


def unlike(version: str, marks: Sequence[str], gpus: int) -> None:
    """In a worker: raise UserError where its machine is not as the driver's."""
    host = socket.gethostname()
    if version != __version__:
        raise UserError(
            where=f"engine, on {host}",
            found=f"draftsmith {__version__}, and {version} where it was started",
            expected="one version",
            remedy="Install the same on every node.",
        )
    for folder in unseen(marks):
        raise UserError(
            where=f"engine, on {host}",
            found=f"no {folder} as the driver sees it",
            expected="a folder that every node shares, or s3://bucket/prefix",
            remedy="Put it on a shared file system; for features: features.store.",
        )
    if gpus:
        import torch

        if torch.cuda.device_count() < gpus:
            raise UserError(
                where=f"engine, on {host}",
                found=f"{torch.cuda.device_count()} GPUs that torch can use, and Ray gave {gpus}",
                expected="a driver and a torch that fit",
                remedy="nvidia-smi there; install torch for its CUDA.",
            )
