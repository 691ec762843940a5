"""What the extract stage will do before it does it: how rows are made, which samples share a row and a
shard, how many bytes that is.
"""

from collections.abc import Callable
from typing import get_args

import torch

from draftsmith import manifest as manifests
from draftsmith.config import Codec, RunConfig
from draftsmith.core import RowPlan, UserError
from draftsmith.places import Place
from draftsmith.target.load import TargetInfo, device_of
from draftsmith.target.packed import can_pack, has_kernels
from draftsmith.target.rows import plan_packed_rows, plan_rows

ENGINES = {
    "padded": "transformers, right-padded batches",
    "packed": "transformers, packed rows",
    "files": "another tool's files",
}
LOSSLESS_SHARE = 0.70  # of real states, docs/formats.md


def engine_of(
    cfg: RunConfig, info: TargetInfo, store: Place, *, gpu: Callable[[], bool] | None = None
) -> str:
    """How rows are made: as configured; auto: as the store was begun, on whatever machine, else the
    fastest way that is right here, or where `gpu` tells of.
    """
    if cfg.extract.rows == "packed" and not can_pack(info.model_type):
        raise UserError(
            where="extract.rows",
            found=f"packed, for a target of type {info.model_type}",
            expected="a family that is proven packed",
            remedy="Use extract.rows: auto.",
        )
    if cfg.extract.files is not None:
        return ENGINES["files"]
    if cfg.extract.rows != "auto":
        return ENGINES[cfg.extract.rows]
    begun = manifests.read(store)
    if begun is not None and begun["inputs"].get("engine") in ENGINES.values():
        return begun["inputs"]["engine"]
    on_gpu = device_of(cfg.target).type == "cuda" if gpu is None else gpu()
    if on_gpu and can_pack(info.model_type) and has_kernels(info.model_type):
        return ENGINES["packed"]
    return ENGINES["padded"]


def plan_of(cfg: RunConfig, lengths: list[int], engine: str) -> RowPlan:
    """The row plan of these samples."""
    plan = plan_packed_rows if engine == ENGINES["packed"] else plan_rows
    return plan(lengths, tokens_per_batch=cfg.extract.tokens_per_batch, seed=cfg.seed)


def token_bytes(cfg: RunConfig, info: TargetInfo, num_taps: int) -> int:
    """Bytes that one token takes in the store, before lossless packing."""
    width = getattr(torch, cfg.features.dtype).itemsize
    tap = info.hidden_size + 4 if cfg.extract.codec == "fp8" else info.hidden_size * width
    final = {"none": 0, "argmax": 4, "state": info.hidden_size * width}[cfg.features.final]
    return num_taps * tap + final + 5


def plan_shards(
    plan: RowPlan, lengths: list[int], bytes_per_token: int, shard_bytes: int
) -> list[list[list[int]]]:
    """Group the plan's rows into shards: closed once they hold `shard_bytes`."""
    planned: list[list[list[int]]] = [[]]
    size = 0
    for row in plan.rows:
        if size >= shard_bytes:
            planned.append([])
            size = 0
        planned[-1].append(row)
        size += sum(lengths[i] for i in row) * bytes_per_token
    return planned


def num_tokens(shard: list[list[int]], lengths: list[int]) -> int:
    """Tokens of a shard's samples."""
    return sum(lengths[i] for row in shard for i in row)


def feature_bytes(cfg: RunConfig, info: TargetInfo, num_taps: int, tokens: int) -> dict[str, int]:
    """Bytes that so many tokens take in the store, for each codec; lossless by its usual share."""
    sizes = {}
    for codec in get_args(Codec):
        extract = cfg.extract.model_copy(update={"codec": codec})
        one = token_bytes(cfg.model_copy(update={"extract": extract}), info, num_taps)
        sizes[codec] = tokens * one
    states = tokens * num_taps * info.hidden_size * getattr(torch, cfg.features.dtype).itemsize
    return {**sizes, "lossless": sizes["lossless"] - round((1 - LOSSLESS_SHARE) * states)}
