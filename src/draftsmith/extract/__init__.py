"""The extract stage: the frozen target reads every sample once; its states at the taps go to the
feature store.

The row plan says which samples share a row; target/forward.py runs one; worker.py makes shards. A
shard is a whole number of rows, so a run that was killed goes on with the missing shards and leaves
the same bytes.
"""

import hashlib
import os
from functools import partial
from typing import Any

import torch

import draftsmith.tokenize as tokenize_stage
from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.config import RunConfig
from draftsmith.core import RowPlan, StageResult, UserError
from draftsmith.engines.local import run_tasks
from draftsmith.extract.worker import ENGINES, Rows, work
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.places import Place
from draftsmith.store import index, shards
from draftsmith.store.shards import KIND, shard_name
from draftsmith.target.load import (
    TargetInfo,
    device_of,
    inspect_target,
    load_tokenizer,
    tokenizer_digest,
)
from draftsmith.target.packed import can_pack, has_kernels
from draftsmith.target.rows import plan_packed_rows, plan_rows
from draftsmith.target.taps import resolve_taps
from draftsmith.tokenize.samples import Samples

PROBES = 8  # samples of the self-test


def run(cfg: RunConfig) -> StageResult:
    """Extract features of both splits into the store."""
    tokens = tokenize_stage.finished(cfg)
    with stage_report(cfg.root, "extract") as report:
        info = inspect_target(cfg.target)
        taps = resolve_taps(cfg.features, info.num_layers)
        store = places.at(cfg.store)
        engine = engine_of(cfg, info, store)
        inputs = _inputs(cfg, info, taps, tokens, engine)
        manifest = manifests.begin(store, KIND, inputs, remake=False)
        if manifest["complete"]:
            return StageResult("extract", str(cfg.store), skipped=True, summary=manifest["counts"])
        samples = tokenize_stage.read_samples(cfg, tokens)
        samples.check_vocabulary(info.vocab_size)
        lengths = samples.lengths
        plan = plan_of(cfg, lengths, engine)
        planned = plan_shards(
            plan, lengths, token_bytes(cfg, info, len(taps)), cfg.extract.shard_bytes
        )
        names = [shard_name(i) for i in range(len(planned))]
        there = store.sizes(names)
        missing = [i for i, name in enumerate(names) if name not in there]
        to_come = sum(_num_tokens(planned[i], lengths) for i in missing)
        _check_disk(cfg, to_come * token_bytes(cfg, info, len(taps)), store)
        report.working(plan.num_tokens, "tokens", done=plan.num_tokens - to_come)
        said = shards.about(manifest["inputs"])
        if missing:
            _extract(cfg, engine, taps, samples, planned, missing, report, said)
        counts = {
            "samples": len(samples),
            "tokens": plan.num_tokens,
            "shards": len(planned),
            "fill": round(plan.num_tokens / plan.padded_tokens, 4),
        }
        manifest = manifests.finish(store, manifest, index.entries(store, names, said), counts)
    return StageResult("extract", str(cfg.store), summary=manifest["counts"])


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete store for this configuration, or a UserError."""
    info = inspect_target(cfg.target)
    taps = resolve_taps(cfg.features, info.num_layers)
    store = places.at(cfg.store)
    engine = engine_of(cfg, info, store)
    inputs = _inputs(cfg, info, taps, tokenize_stage.finished(cfg), engine)
    return manifests.required(store, "extract", inputs)


def engine_of(cfg: RunConfig, info: TargetInfo, store: Place) -> str:
    """How rows are made: as configured; auto: as the store was begun, on whatever machine, else the
    fastest way that is right here.
    """
    if cfg.extract.rows == "packed" and not can_pack(info.model_type):
        raise UserError(
            where="extract.rows",
            found=f"packed, for a target of type {info.model_type}",
            expected="a family that is proven packed",
            remedy="Use extract.rows: auto.",
        )
    if cfg.extract.rows != "auto":
        return ENGINES[cfg.extract.rows]
    begun = manifests.read(store)
    if begun is not None and begun["inputs"].get("engine") in ENGINES.values():
        return begun["inputs"]["engine"]
    gpu = device_of(cfg.target).type == "cuda"
    if gpu and can_pack(info.model_type) and has_kernels(info.model_type):
        return ENGINES["packed"]
    return ENGINES["padded"]


def plan_of(cfg: RunConfig, lengths: list[int], engine: str) -> RowPlan:
    """The row plan of these samples."""
    plan = plan_packed_rows if engine == ENGINES["packed"] else plan_rows
    return plan(lengths, tokens_per_batch=cfg.extract.tokens_per_batch, seed=cfg.seed)


def _inputs(
    cfg: RunConfig, info: TargetInfo, taps: list[int], tokens: dict[str, Any], engine: str
) -> dict[str, Any]:
    tokenizer = load_tokenizer(cfg.target)
    return {
        "target": info.identity(),
        "taps": taps,
        "tokenizer": tokenizer_digest(tokenizer),
        "template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "tokens": tokens["digest"],
        "convention": "tap i = raw output of 0-based decoder layer i = HF hidden_states[i+1]",
        "final": cfg.features.final,
        "dtype": cfg.features.dtype,
        "compute_dtype": cfg.target.dtype,
        "codec": cfg.extract.codec,
        "engine": engine,
        "tokens_per_batch": cfg.extract.tokens_per_batch,
        "shard_bytes": cfg.extract.shard_bytes,
        "seed": cfg.seed,
    }


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


def _num_tokens(shard: list[list[int]], lengths: list[int]) -> int:
    return sum(lengths[i] for row in shard for i in row)


def _check_disk(cfg: RunConfig, need: int, store: Place) -> None:
    free = store.free_bytes()
    if free is not None and need > free:
        raise UserError(
            where=str(cfg.store),
            found=f"{free / 1e9:.3f} GB free",
            expected=f"{need / 1e9:.3f} GB for the features",
            remedy="Use fewer samples or taps, features.dtype: bfloat16, or a larger disk.",
        )


def _extract(
    cfg: RunConfig,
    engine: str,
    taps: list[int],
    samples: Samples,
    planned: list[list[list[int]]],
    missing: list[int],
    report: StageReport,
    said: dict[str, str],
) -> None:
    """One worker for each replica of the target; a single one is this process."""
    report.event("rows", engine=engine)
    done = report.state["done"]

    ran: dict[int, int] = {}  # tokens of each shard so far

    def told(message: tuple[int, int] | dict[str, Any]) -> None:
        nonlocal done
        if isinstance(message, dict):
            report.event(**message)
            return
        number, tokens = message
        ran[number] = ran.get(number, 0) + tokens
        done += tokens
        report.progress(done)

    def lost(said: str, numbers: list[int]) -> None:
        nonlocal done
        done -= sum(ran.pop(number, 0) for number in numbers)
        report.event("worker_lost", said=said, shards=numbers)
        print(f"extract: {said}; its shards are done again by another", flush=True)

    def load(number: int) -> Rows:
        return [[samples[i] for i in row] for row in planned[number]]

    gpus = _gpus(cfg)
    run_worker = partial(work, cfg, engine, taps, samples[:PROBES], said)
    if len(gpus) == 1:
        tasks = ((number, load(number)) for number in missing)
        run_worker(tasks, told, lambda number: None)
        return
    run_tasks(run_worker, missing, load=load, gpus=gpus, on_message=told, on_loss=lost)


def _gpus(cfg: RunConfig) -> list[str] | list[None]:
    """The GPUs of each worker, as CUDA_VISIBLE_DEVICES names them."""
    if device_of(cfg.target).type == "cpu":
        return [None] * (1 if cfg.extract.workers == "auto" else cfg.extract.workers)
    count, each = torch.cuda.device_count(), cfg.target.gpus_per_replica
    most = count // each
    if most == 0:
        raise UserError(
            where="target.gpus_per_replica",
            found=f"{each}, and {count} GPUs here",
            expected="no more than there are",
            remedy="Lower it, or use a larger machine.",
        )
    workers = most if cfg.extract.workers == "auto" else min(most, cfg.extract.workers)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = named if len(named) == count else [str(i) for i in range(count)]
    return [",".join(names[i * each : (i + 1) * each]) for i in range(workers)]
