"""The extract stage: the frozen target reads every sample once; its states at the taps go to the
feature store.

The row plan says which samples share a row; target/forward.py runs one. A shard is a whole number
of rows, so a run that was killed goes on with the missing shards and leaves the same bytes. While
the target computes a row, the rows before are copied, checked, encoded and written.
"""

import hashlib
from collections import deque
from typing import Any

import torch

import draftsmith.tokenize as tokenize_stage
from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.config import RunConfig
from draftsmith.core import RowPlan, Sample, StageResult, UserError
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.places import Place
from draftsmith.store import index, shards
from draftsmith.store.shards import KIND, SampleFeatures, shard_name
from draftsmith.store.writer import ShardWriter
from draftsmith.target.forward import RowStates, StatesForward
from draftsmith.target.load import (
    TargetInfo,
    check_ids,
    device_of,
    inspect_target,
    load_target,
    load_tokenizer,
    tokenizer_digest,
    unembed,
)
from draftsmith.target.packed import can_pack, has_kernels
from draftsmith.target.rows import plan_packed_rows, plan_rows
from draftsmith.target.selftest import self_test
from draftsmith.target.taps import resolve_taps

ENGINES = {
    "padded": "transformers, right-padded batches",
    "packed": "transformers, packed rows",
}
AHEAD = 2  # rows that the GPU has been given before the CPU looks at the first one's states


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
        for sample in samples:
            check_ids(max(sample.input_ids), info, f"sample {sample.sample_id}")
        plan = plan_of(cfg, [len(s.input_ids) for s in samples], engine)
        planned = plan_shards(
            plan, samples, token_bytes(cfg, info, len(taps)), cfg.extract.shard_bytes
        )
        names = [shard_name(i) for i in range(len(planned))]
        there = store.sizes(names)
        missing = [i for i, name in enumerate(names) if name not in there]
        _check_disk(cfg, info, taps, planned, samples, missing, store)
        finished = plan.num_tokens - sum(_num_tokens(planned[i], samples) for i in missing)
        report.working(plan.num_tokens, "tokens", done=finished)
        said = shards.about(manifest["inputs"])
        if missing:
            _extract(cfg, engine, taps, samples, planned, missing, report, store, said)
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
    plan: RowPlan, samples: list[Sample], bytes_per_token: int, shard_bytes: int
) -> list[list[list[int]]]:
    """Group the plan's rows into shards: closed once they hold `shard_bytes`."""
    planned: list[list[list[int]]] = [[]]
    size = 0
    for row in plan.rows:
        if size >= shard_bytes:
            planned.append([])
            size = 0
        planned[-1].append(row)
        size += sum(len(samples[i].input_ids) for i in row) * bytes_per_token
    return planned


def _num_tokens(shard: list[list[int]], samples: list[Sample]) -> int:
    return sum(len(samples[i].input_ids) for row in shard for i in row)


def _check_disk(
    cfg: RunConfig,
    info: TargetInfo,
    taps: list[int],
    planned: list,
    samples: list[Sample],
    missing: list[int],
    store: Place,
) -> None:
    need = sum(_num_tokens(planned[i], samples) for i in missing) * token_bytes(
        cfg, info, len(taps)
    )
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
    samples: list[Sample],
    planned: list,
    missing: list[int],
    report: StageReport,
    store: Place,
    said: dict[str, str],
) -> None:
    _check_kernels(cfg, engine)
    model = load_target(cfg.target)
    unembed(model)  # a head the drafter cannot share is better refused before the work
    packed = engine == ENGINES["packed"]
    forward = StatesForward(
        model,
        taps,
        cfg.features.final,
        getattr(torch, cfg.features.dtype),
        row_tokens=cfg.extract.tokens_per_batch if packed else None,
    )
    report.event("rows", engine=engine)
    if packed:
        report.event("self_test", **self_test(forward, samples))
    with ShardWriter(store, cfg.extract.codec, said, report.event) as writer:
        extract_shards(forward, samples, planned, missing, writer, report)


def _check_kernels(cfg: RunConfig, engine: str) -> None:
    """Without fla a GPU runs a hybrid's recurrence in plain torch: right, and several times slower."""
    info = inspect_target(cfg.target)
    if device_of(cfg.target).type != "cuda" or has_kernels(info.model_type):
        return
    install = "pip install fla-core"
    if engine == ENGINES["packed"]:
        raise UserError(
            where="extract.rows",
            found=f"packed rows of {info.model_type} on a GPU, and no flash-linear-attention",
            expected="its kernels, which reset states inside a row",
            remedy=f"{install}, or extract.rows: padded in a new store.",
        )
    print(
        f"extract: flash-linear-attention is not installed: {info.model_type} runs in right-padded "
        f"batches with Transformers' own recurrence, right but several times slower ({install})",
        flush=True,
    )


def extract_shards(
    forward: StatesForward,
    samples: list[Sample],
    planned: list[list[list[int]]],
    missing: list[int],
    writer: ShardWriter,
    report: StageReport,
) -> None:
    """Run the rows of the missing shards and hand each shard to the writer. AHEAD rows are always
    under way, so that a GPU never waits for the CPU's checks.
    """
    done = report.state["done"]
    underway: deque[tuple[int, bool, RowStates]] = deque()
    shard: list[SampleFeatures] = []

    def take() -> None:
        nonlocal done, shard
        number, last, states = underway.popleft()
        shard += states.features()
        done += sum(len(s.input_ids) for s in states.samples)
        report.progress(done)
        if last:
            writer.put(shard_name(number), shard)
            shard = []

    for number in missing:
        for row in planned[number]:
            states = forward([samples[i] for i in row])
            underway.append((number, row is planned[number][-1], states))
            if len(underway) > AHEAD:
                take()
    while underway:
        take()
