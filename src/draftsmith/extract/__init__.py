"""The extract stage: the frozen target reads every sample once; its states at the taps go to the
feature store.

The row plan says which samples share a row; target/forward.py runs one; worker.py makes shards. A
shard is a whole number of rows, so a run that was killed goes on with the missing shards and leaves
the same bytes.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import draftsmith.tokenize as tokenize_stage
from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.config import RunConfig
from draftsmith.core import RowPlan, StageResult, UserError
from draftsmith.engines import Tasks, for_workers, has_gpus, run_tasks
from draftsmith.extract.plan import (
    engine_of,
    feature_bytes,
    num_tokens,
    plan_of,
    plan_shards,
    token_bytes,
)
from draftsmith.extract.worker import Rows, work
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.places import Place
from draftsmith.source import Choice, choose_source
from draftsmith.store import index, shards
from draftsmith.store.foreign import ForeignStates
from draftsmith.store.shards import KIND, shard_name
from draftsmith.store.writer import check_some, room_left
from draftsmith.target.load import (
    TargetInfo,
    inspect_target,
    load_tokenizer,
    tokenizer_digest,
)
from draftsmith.target.taps import resolve_taps
from draftsmith.tokenize.samples import Samples

PROBES = 8  # samples of the self-test


def run(cfg: RunConfig) -> StageResult:
    """Extract features of both splits into the store; with the source live there is nothing to do."""
    tokens = tokenize_stage.finished(cfg)
    sizes = f"extract.tokens_per_batch {cfg.extract.tokens_per_batch}"
    with stage_report(cfg.root, "extract", sizes) as report:
        info = inspect_target(cfg.target)
        taps = resolve_taps(cfg.features, info.num_layers)
        store = places.at(cfg.store)
        engine = engine_of(cfg, info, store, gpu=lambda: has_gpus(cfg))
        inputs = _inputs(cfg, info, taps, tokens, engine)
        work = _work_of(cfg, info, taps, tokens, engine)
        choice = _choice(cfg, info, taps, work, store)
        if cfg.features.source == "auto":
            report.event("source", source=choice.source, reason=choice.reason)
            print(f"features.source auto: {choice.source}, because {choice.reason}", flush=True)
        if choice.source == "live":
            return StageResult("extract", str(cfg.store), summary={"source": "live"})
        manifest = manifests.begin(store, KIND, inputs, remake=False)
        if manifest["complete"]:
            return StageResult("extract", str(cfg.store), skipped=True, summary=manifest["counts"])
        work.samples.check_vocabulary(info.vocab_size)
        names, room = work.names, None
        if cfg.features.max_bytes is not None:
            room = room_left(store, store.sizes(names), cfg.features.max_bytes)
        report.working(
            work.plan.num_tokens, "tokens", done=work.plan.num_tokens - work.tokens_to_come
        )
        said = shards.about(manifest["inputs"])
        if work.missing:
            _extract(cfg, engine, taps, work, report, said, room)
        if room is not None:
            there = store.sizes(names)
            names = [name for name in names if name in there]
            check_some(names, cfg.store)
        entries = index.entries(store, names, said)
        counts = _counts(entries, len(work.samples), work.plan)
        manifest = manifests.finish(store, manifest, entries, counts)
    return StageResult("extract", str(cfg.store), summary=manifest["counts"])


@dataclass(frozen=True)
class _Work:
    """The shards of a configuration, as rows of positions, and which of them are still to be made."""

    samples: Samples
    plan: RowPlan
    planned: list[list[list[int]]]
    names: list[str]
    missing: list[int]
    tokens_to_come: int


def _work_of(
    cfg: RunConfig, info: TargetInfo, taps: list[int], tokens: dict[str, Any], engine: str
) -> _Work:
    samples, store = tokenize_stage.read_samples(cfg, tokens), places.at(cfg.store)
    lengths = samples.lengths
    plan = plan_of(cfg, lengths, engine)
    planned = plan_shards(plan, lengths, token_bytes(cfg, info, len(taps)), cfg.extract.shard_bytes)
    names = [shard_name(i) for i in range(len(planned))]
    there = store.sizes(names)
    missing = [i for i, name in enumerate(names) if name not in there]
    if cfg.features.max_bytes is not None:
        missing = _before_the_cut(store, planned, missing)
    to_come = sum(num_tokens(planned[i], lengths) for i in missing)
    return _Work(samples, plan, planned, names, missing, to_come)


def source_of(cfg: RunConfig) -> Literal["store", "live"]:
    """Where training gets its features from: as configured; auto: as training was begun, else the store
    where it is complete or fits.
    """
    if cfg.features.source != "auto":
        return cfg.features.source
    begun = manifests.read(cfg.root / "checkpoints")
    if begun is not None and "source" in begun["inputs"]:
        return begun["inputs"]["source"]
    if is_finished(cfg):
        return "store"
    store = places.at(cfg.store)
    info = inspect_target(cfg.target)
    taps, tokens = resolve_taps(cfg.features, info.num_layers), tokenize_stage.finished(cfg)
    work = _work_of(cfg, info, taps, tokens, engine_of(cfg, info, store))
    return _choice(cfg, info, taps, work, store).source


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete store for this configuration, or a UserError."""
    return manifests.required(places.at(cfg.store), "extract", wanted(cfg))


def is_finished(cfg: RunConfig) -> bool:
    """Whether there is a complete store for this configuration."""
    return manifests.is_there(lambda: finished(cfg))


def wanted(cfg: RunConfig) -> dict[str, Any]:
    """What this configuration's store is made from, as its manifest says it."""
    info = inspect_target(cfg.target)
    taps = resolve_taps(cfg.features, info.num_layers)
    engine = engine_of(cfg, info, places.at(cfg.store))
    return json.loads(json.dumps(_inputs(cfg, info, taps, tokenize_stage.finished(cfg), engine)))


def _inputs(
    cfg: RunConfig, info: TargetInfo, taps: list[int], tokens: dict[str, Any], engine: str
) -> dict[str, Any]:
    tokenizer = load_tokenizer(cfg.target)
    files = cfg.extract.files
    foreign = {} if files is None else {"files": files.model_dump(exclude={"path"})}
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
        **foreign,
        "tokens_per_batch": cfg.extract.tokens_per_batch,
        "shard_bytes": cfg.extract.shard_bytes,
        "seed": cfg.seed,
        **({} if cfg.features.max_bytes is None else {"max_bytes": cfg.features.max_bytes}),
    }


def _before_the_cut(store: Place, planned: list[list[list[int]]], missing: list[int]) -> list[int]:
    """The missing shards of a store with a budget that may still fit: none once the last shard that
    is there lacks samples of its plan.
    """
    last = max(set(range(len(planned))) - set(missing), default=None)
    if last is None:
        return missing
    held = len(shards.open_shard(store, shard_name(last)).small["sample_ids"])
    cut = held < sum(map(len, planned[last]))
    return [i for i in missing if i < last or not cut]


def _counts(entries: dict[str, Any], num_samples: int, plan: RowPlan) -> dict[str, Any]:
    stored = entries[index.NAME]["samples"]
    counts = {
        "samples": stored,
        "tokens": sum(entry.get("tokens", 0) for entry in entries.values()),
        "shards": len(entries) - 1,
        "fill": round(plan.num_tokens / plan.padded_tokens, 4),
    }
    return counts if stored == num_samples else {**counts, "left_out": num_samples - stored}


def _choice(cfg: RunConfig, info: TargetInfo, taps: list[int], work: _Work, store: Place) -> Choice:
    said = cfg.features.source
    if said == "live":
        return Choice("live", "features.source says so")
    begun = manifests.read(cfg.root / "checkpoints") if said == "auto" else None
    if begun is not None and "source" in begun["inputs"]:
        return Choice(begun["inputs"]["source"], "training was begun with it")
    sizes = feature_bytes(cfg, info, len(taps), work.tokens_to_come)
    room, bound = store.free_bytes(), cfg.features.max_bytes
    if bound is not None and said == "store":
        sizes = {codec: min(size, bound) for codec, size in sizes.items()}
        bound = None
    # with a bound, auto leaves no sample out: it takes live, and keeps what fits
    place = str(store)
    choice = choose_source(sizes, cfg.extract.codec, room_bytes=room, place=place, max_bytes=bound)
    if choice.source == "live" and (said == "store" or cfg.extract.files is not None):
        raise UserError(
            where=f"features.source: {said}",
            found=choice.reason,
            expected=f"{sizes[cfg.extract.codec] / 1e9:.3f} GB for the features",
            remedy="Use features.source: live, fewer samples or taps, another extract.codec, a larger "
            "disk, or s3:// as features.store; `draftsmith plan` shows the numbers.",
        )
    return choice


def _extract(
    cfg: RunConfig,
    engine: str,
    taps: list[int],
    todo: _Work,
    report: StageReport,
    said: dict[str, str],
    room: int | None,
) -> None:
    """One worker for each replica of the target; a single one is this process."""
    report.event("rows", engine=engine)
    samples, missing = todo.samples, todo.missing
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
        return [[samples[i] for i in row] for row in todo.planned[number]]

    if cfg.extract.files is not None:
        ForeignStates.of(cfg, inspect_target(cfg.target), taps).check(samples)
    tasks = Tasks(
        "extract",
        partial(work, for_workers(cfg), engine, taps, samples[:PROBES], said, room),
        missing,
        load,
        on_message=told,
        on_loss=lost,
        on_wait=report.tick,
        folders=[cfg.store],
    )
    run_tasks(cfg, tasks, workers=_workers(cfg), gpu=cfg.extract.files is None)


def _workers(cfg: RunConfig) -> int | Literal["auto"]:
    """With a budget one writer knows what is left of it."""
    if cfg.features.max_bytes is None:
        return cfg.extract.workers
    if cfg.extract.workers not in ("auto", 1):
        raise UserError(
            where="extract.workers",
            found=f"{cfg.extract.workers}, with features.max_bytes",
            expected="one worker: it counts what is left of the budget",
            remedy="Leave out one of the two.",
        )
    return 1
