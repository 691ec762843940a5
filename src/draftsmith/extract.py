"""The extract stage: the frozen target reads every sample once; its states at the taps go to the
feature store.

Hooks on the taps of the text model, which is cut after the last tap; length-bucketed right-padded
batches without a mask (causal layers never look right, so real tokens are exact; padding is never
stored). A shard is a whole number of rows of the row plan, so a run that was killed goes on with
the missing shards and leaves the same bytes.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import draftsmith.tokenize as tokenize_stage
from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.config import RunConfig
from draftsmith.core import RowPlan, Sample, StageResult, UserError
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.places import Place
from draftsmith.store import index, shards
from draftsmith.store.shards import KIND, SampleFeatures, shard_name
from draftsmith.store.writer import ShardWriter, check_some, room_left
from draftsmith.target.load import (
    TargetInfo,
    check_ids,
    cut_after,
    inspect_target,
    load_target,
    load_tokenizer,
    text_decoder,
    tokenizer_digest,
    unembed,
)
from draftsmith.target.rows import plan_rows
from draftsmith.target.taps import capture, decoder_layers, resolve_taps, stack_taps

PAD_ID = 0  # any row of the embedding: nothing real ever sees it


def run(cfg: RunConfig) -> StageResult:
    """Extract features of both splits into the store."""
    tokens = tokenize_stage.finished(cfg)
    with stage_report(cfg.root, "extract") as report:
        info = inspect_target(cfg.target)
        taps = resolve_taps(cfg.features, info.num_layers)
        store = places.at(cfg.store)
        manifest = manifests.begin(store, KIND, _inputs(cfg, info, taps, tokens), remake=False)
        if manifest["complete"]:
            return StageResult("extract", str(cfg.store), skipped=True, summary=manifest["counts"])
        samples = tokenize_stage.read_samples(cfg, tokens)
        for sample in samples:
            check_ids(max(sample.input_ids), info, f"sample {sample.sample_id}")
        plan = plan_rows(
            [len(s.input_ids) for s in samples],
            tokens_per_batch=cfg.extract.tokens_per_batch,
            seed=cfg.seed,
        )
        planned = plan_shards(
            plan, samples, token_bytes(cfg, info, len(taps)), cfg.extract.shard_bytes
        )
        names = [shard_name(i) for i in range(len(planned))]
        there = store.sizes(names)
        missing = [i for i, name in enumerate(names) if name not in there]
        room = None
        if cfg.features.max_bytes is not None:
            room = room_left(store, there, cfg.features.max_bytes)
            missing = _before_the_cut(store, planned, missing)
        _check_disk(cfg, info, taps, planned, samples, missing, store)
        finished = plan.num_tokens - sum(_num_tokens(planned[i], samples) for i in missing)
        report.working(plan.num_tokens, "tokens", done=finished)
        said = shards.about(manifest["inputs"])
        if missing:
            _extract(cfg, taps, samples, planned, missing, report, store, said, room)
        if room is not None:
            there = store.sizes(names)
            names = [name for name in names if name in there]
            check_some(names, cfg.store)
        entries = index.entries(store, names, said)
        counts = _counts(entries, samples, plan)
        manifest = manifests.finish(store, manifest, entries, counts)
    return StageResult("extract", str(cfg.store), summary=manifest["counts"])


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
    return json.loads(json.dumps(_inputs(cfg, info, taps, tokenize_stage.finished(cfg))))


def _inputs(
    cfg: RunConfig, info: TargetInfo, taps: list[int], tokens: dict[str, Any]
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
        "engine": "transformers, right-padded batches",
        "tokens_per_batch": cfg.extract.tokens_per_batch,
        "shard_bytes": cfg.extract.shard_bytes,
        "seed": cfg.seed,
        **({} if cfg.features.max_bytes is None else {"max_bytes": cfg.features.max_bytes}),
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


def _counts(entries: dict[str, Any], samples: list[Sample], plan: RowPlan) -> dict[str, Any]:
    stored = entries[index.NAME]["samples"]
    counts = {
        "samples": stored,
        "tokens": sum(entry.get("tokens", 0) for entry in entries.values()),
        "shards": len(entries) - 1,
        "fill": round(plan.num_tokens / plan.padded_tokens, 4),
    }
    return counts if stored == len(samples) else {**counts, "left_out": len(samples) - stored}


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
    if cfg.features.max_bytes is not None:
        need = min(need, cfg.features.max_bytes)
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
    taps: list[int],
    samples: list[Sample],
    planned: list,
    missing: list[int],
    report: StageReport,
    store: Place,
    said: dict[str, str],
    room: int | None,
) -> None:
    model = load_target(cfg.target)
    unembed(model)  # a head the drafter cannot share is better refused before the work
    forward = StatesForward(model, taps, cfg.features.final, getattr(torch, cfg.features.dtype))
    done = report.state["done"]
    with ShardWriter(store, cfg.extract.codec, said, report.event, room) as writer:
        for number in missing:
            if writer.full:
                report.event("budget_spent", shard=number)
                break
            out: list[SampleFeatures] = []
            for row in planned[number]:
                for features in forward([samples[i] for i in row]):
                    _check_states(features, taps)
                    out.append(features)
                done += sum(len(samples[i].input_ids) for i in row)
                report.progress(done)
            writer.put(shard_name(number), out)


class StatesForward:
    """The cut target on one row of samples."""

    def __init__(
        self, model: PreTrainedModel, taps: list[int], final: str, dtype: torch.dtype
    ) -> None:
        self.model, self.taps, self.final, self.dtype = model, taps, final, dtype
        self.decoder: nn.Module = text_decoder(model)
        self.last = len(decoder_layers(self.decoder, "target.model")) - 1
        if final == "none":
            cut_after(self.decoder, taps[-1] + 1)

    @torch.inference_mode()
    def __call__(self, row: list[Sample]) -> Iterator[SampleFeatures]:
        """Features of each sample of the row, on the CPU, without padding."""
        width = max(len(s.input_ids) for s in row)
        ids = torch.full((len(row), width), PAD_ID)
        for i, sample in enumerate(row):
            ids[i, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        layers = self.taps + ([self.last] if self.final == "state" else [])
        with capture(self.decoder, layers) as seen:
            out = self.decoder(input_ids=ids.to(self.model.device), use_cache=False)
        hidden = stack_taps(seen, self.taps).to("cpu", self.dtype)
        extra = self._extra(seen, out.last_hidden_state)
        for i, sample in enumerate(row):
            n = len(sample.input_ids)
            yield SampleFeatures(
                sample, hidden[i, :n].clone(), {name: t[i, :n].clone() for name, t in extra.items()}
            )

    def _extra(self, seen: dict[int, Tensor], normed: Tensor) -> dict[str, Tensor]:
        if self.final == "state":
            return {"final": seen[self.last].to("cpu", self.dtype)}
        if self.final == "argmax":
            head = self.model.get_output_embeddings()
            assert head is not None, "a causal LM has output embeddings"
            rows = [
                head(row).argmax(-1) for row in normed
            ]  # a row at a time: logits are vocabulary-wide
            return {"argmax": torch.stack(rows).to("cpu", torch.int32)}
        return {}


def _check_states(features: SampleFeatures, taps: list[int]) -> None:
    """NaN, infinite or all-zero states train a drafter that is never accepted: stop and name them."""
    peaks = features.hidden.float().abs().amax(dim=(0, 2)).tolist()
    for tap, peak in zip(taps, peaks, strict=True):
        if peak == 0 or not math.isfinite(peak):
            raise UserError(
                where=f"sample {features.sample.sample_id}, tap {tap}",
                found="all-zero states" if peak == 0 else "states that are NaN or infinite",
                expected="finite, non-zero states",
                remedy="Check the weights and target.dtype.",
            )
