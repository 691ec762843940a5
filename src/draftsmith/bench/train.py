"""`draftsmith bench train`: a step of the trainer on synthetic features of any size, beside what the step's
own matrix products alone would take.

The ceiling replays those products (train/ceiling.py), interleaved with the steps; medians. `--source live`
runs a random target beside the trainer and compares with each alone.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from draftsmith import manifest as manifests
from draftsmith import places, train
from draftsmith.bench.clock import (
    device_within,
    free_bytes,
    scratch_in,
    time_of,
    two_columns,
    wait_for,
    where_time_goes,
)
from draftsmith.bench.models import BUILT_IN, config_of, drafter_shape, random_target
from draftsmith.config import RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.drafter.config import DrafterShape
from draftsmith.drafter.model import DFlash
from draftsmith.features import FeatureBatch, StoreSource
from draftsmith.ranks import Ranks
from draftsmith.store import index, shards
from draftsmith.store.shards import KIND, SampleFeatures, shard_name, write_shard
from draftsmith.target.forward import StatesForward
from draftsmith.target.load import unembed
from draftsmith.target.packed import can_pack, has_kernels
from draftsmith.target.rows import TURN_ROWS
from draftsmith.target.taps import auto_taps
from draftsmith.train.ceiling import products_of, replay_of
from draftsmith.train.live import LiveSource
from draftsmith.train.schedule import Step, deal

WARM_UP = 4  # steps that are not measured; the first one compiles
SourceName = Literal["memory", "store", "live"]


def run(
    *,
    model: str,
    layers: int,
    block_size: int,
    tokens: int,
    anchors: int,
    accumulate: int,
    steps: int,
    source: SourceName,
    folder: Path,
    memory_gib: float | None,
    recompute: bool,
    as_json: bool,
) -> None:
    """Measure and print. A micro-batch is one sequence of `tokens` with so many `anchors`; a step is
    `accumulate` of them.
    """
    begun = time.monotonic()
    device, dtype = device_within(memory_gib)
    config = config_of(model)
    taps = BUILT_IN[model][0] if model in BUILT_IN else auto_taps(config.num_hidden_layers, 5)
    shape = drafter_shape(config, taps, layers, block_size)
    cfg = _config(tokens, anchors, accumulate, recompute)
    micro = _samples(config.vocab_size, tokens, count=4)
    with scratch_in(folder) as scratch:
        target = None
        if source == "live":
            target = _target(config, taps, dtype, device, tokens)
            frozen = unembed(target.model)[:2]
        else:
            frozen = (
                _random(config.vocab_size, shape.hidden_size, device, dtype),
                _random(config.vocab_size, shape.hidden_size, device, dtype),
            )
        drafter = DFlash(shape).to(device)
        torch.nn.init.normal_(drafter.fc.weight, std=0.02)
        drafter.share(*frozen, dtype=dtype)
        forward, optimizer = train.prepare(cfg, drafter, None, Ranks())
        if source == "live":  # the target runs for some rows at a time: whole turns of it
            steps += -steps % TURN_ROWS
        turns = range((WARM_UP + steps) * accumulate)
        if source == "memory":
            batches = itertools.cycle(_in_memory(micro, shape, device, dtype))
        elif source == "store":
            micro = _samples(config.vocab_size, tokens, count=(WARM_UP + steps) * accumulate)
            stored = _stored(micro, shape, scratch, dtype)
            planned = [Step(0, [[i]]) for i in turns]  # each read from the disk, once
            dealt = deal(planned, stored.lengths, 1)
            batches = forward.micro_batches(stored, planned, dealt, Ranks())
        else:
            assert target is not None, "live runs a target"
            live = LiveSource(target, micro, row_tokens=tokens)
            planned = [Step(0, [[i % len(micro)]]) for i in turns]
            dealt = deal(planned, live.lengths, 1)
            batches = forward.micro_batches(live, planned, dealt, Ranks())
        shapes = products_of(shape, tokens, anchors, anchors * (block_size - 1))
        replay = replay_of(shapes, device, dtype)

        def step() -> train.Sums:
            sums = train.train_step(forward, batches, accumulate, 0, Ranks(), clip_norm=1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return sums

        step()
        wait_for(device)
        first_s = time.monotonic() - begun
        for _ in range(WARM_UP - 1):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        replay()
        took, ceilings, waited = [], [], 0.0
        for _ in range(steps):
            started = time.monotonic()
            waited += step().waited_s
            wait_for(device)
            took.append(time.monotonic() - started)
            ceilings.append(time_of(replay, device) * accumulate)
        step_s = sum(took) / steps if source == "live" else statistics.median(took)
        result: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "model": model,
            "source": source,
            "layers": layers,
            "block_size": block_size,
            "tokens": tokens,
            "anchors": anchors,
            "accumulate": accumulate,
            "recompute": recompute,
            "first_step_s": first_s,
            "step_s": step_s,
            "ceiling_s": statistics.median(ceilings),
            "data_wait_share": waited / sum(took),
            "block_tokens_per_s": anchors * block_size * accumulate / step_s,
            "tokens_per_s": tokens * accumulate / step_s,
        }
        result["share_of_ceiling"] = result["ceiling_s"] / result["step_s"]
        if device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
        if target is not None:
            result |= _apart(target, micro, step, forward, shape, device, dtype, accumulate)
        if device.type == "cuda" and source != "live":
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                batches = itertools.cycle(_in_memory(micro, shape, device, dtype))
                for _ in range(2):
                    step()
                torch.cuda.synchronize()
            result |= where_time_goes(seen)
    print(json.dumps(result, indent=1) if as_json else _table(result))


def _config(tokens: int, anchors: int, accumulate: int, recompute: bool) -> RunConfig:
    settings = {
        "micro_batch_tokens": tokens, "anchors_per_sample": anchors, "micro_batch_blocks": anchors,
        "tokens_per_step": tokens * accumulate, "recompute": recompute, "loggers": [],
    }  # fmt: skip
    said = {"run": "bench", "target": {"model": "random"}, "prepare": {"sources": [{"path": "x"}]}}
    return RunConfig.model_validate({**said, "train": settings})


def _samples(vocab: int, tokens: int, count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(i, torch.randint(vocab, (tokens,), generator=generator).tolist(), [1] * tokens)
        for i in range(count)
    ]


def _random(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=dtype) * 0.02


def _states(shape: DrafterShape, tokens: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, len(shape.taps), shape.hidden_size, device=device, dtype=dtype)


def _in_memory(
    samples: list[Sample], shape: DrafterShape, device: torch.device, dtype: torch.dtype
) -> Iterator[FeatureBatch]:
    for sample in samples:
        n = len(sample.input_ids)
        ids, mask = torch.tensor(sample.input_ids), torch.ones(n, dtype=torch.uint8)
        yield FeatureBatch([sample.sample_id], [n], _states(shape, n, device, dtype), ids, mask)


def _stored(
    samples: list[Sample], shape: DrafterShape, folder: Path, dtype: torch.dtype
) -> StoreSource:
    """A store of them on the folder's disk, its pages dropped from memory."""
    from draftsmith.bench.store import drop_cache

    n = len(samples[0].input_ids)
    need = len(samples) * n * len(shape.taps) * shape.hidden_size * dtype.itemsize
    if need > free_bytes(folder):
        raise UserError(
            where="--folder",
            found=f"{free_bytes(folder) / 1e9:.1f} GB free in {folder}",
            expected=f"{need / 1e9:.1f} GB",
            remedy="Use another --folder.",
        )
    place = places.at(folder)
    inputs = {
        "target": {"hidden_size": shape.hidden_size}, "taps": list(shape.taps), "codec": "none",
        "dtype": str(dtype).removeprefix("torch."), "final": "none",
    }  # fmt: skip
    manifest = manifests.begin(place, KIND, inputs, remake=False)
    names = []
    for sample in samples:
        names.append(shard_name(len(names)))
        made = SampleFeatures(sample, _states(shape, n, torch.device("cpu"), dtype), {})
        write_shard(place, names[-1], [made], "none", shards.about(inputs))
    manifests.finish(place, manifest, index.entries(place, names, shards.about(inputs)), {})
    drop_cache(folder)
    return StoreSource(place, [sample.sample_id for sample in samples])


def _target(
    config: Any, taps: list[int], dtype: torch.dtype, device: torch.device, tokens: int
) -> StatesForward:
    kind = config.model_type
    packed = device.type == "cuda" and can_pack(kind) and has_kernels(kind)
    model = random_target(config, device, dtype)
    return StatesForward(model, taps, "none", dtype, row_tokens=tokens if packed else None)


def _apart(
    target: StatesForward,
    samples: list[Sample],
    step: Callable[[], Any],
    forward: Any,
    shape: DrafterShape,
    device: torch.device,
    dtype: torch.dtype,
    accumulate: int,
) -> dict[str, float]:
    """Extraction alone and training alone, of as many tokens as a step."""
    alone = [time_of(lambda: target.on_device([samples[0]]), device) for _ in range(5)]
    batches = itertools.cycle(_in_memory(samples, shape, device, dtype))
    trained = [
        time_of(
            lambda: train.train_step(forward, batches, accumulate, 0, Ranks(), clip_norm=1.0),
            device,
        )
        for _ in range(5)
    ]
    return {
        "extraction_alone_s": statistics.median(alone) * accumulate,
        "training_alone_s": statistics.median(trained),
    }


def _table(result: dict[str, Any]) -> str:
    rows = [
        ("step", f"{result['step_s'] * 1e3:,.1f} ms"),
        ("share of the ceiling", f"{result['share_of_ceiling']:.1%}"),
        ("  ceiling: the step's matrix products alone", f"{result['ceiling_s'] * 1e3:,.1f} ms"),
        ("block tokens/s", f"{result['block_tokens_per_s']:,.0f}"),
        ("target tokens/s", f"{result['tokens_per_s']:,.0f}"),
        ("waited for features", f"{result['data_wait_share']:.1%}"),
        ("first step after", f"{result['first_step_s']:.0f} s"),
    ]
    if "peak_gib" in result:
        rows.append(("peak memory", f"{result['peak_gib']:.1f} GiB"))
    if "extraction_alone_s" in result:
        both = result["extraction_alone_s"] + result["training_alone_s"]
        rows.append(("extraction alone", f"{result['extraction_alone_s'] * 1e3:,.1f} ms"))
        rows.append(("training alone", f"{result['training_alone_s'] * 1e3:,.1f} ms"))
        rows.append(("live, of their sum", f"{result['step_s'] / both:.3f}x"))
    rows += [(f"  {kind}", f"{share:.1%}") for kind, share in result.get("by_kind", {}).items()]
    title = (
        f"{result['model']} drafter, {result['layers']} layers, block {result['block_size']}, "
        f"{result['accumulate']} x {result['tokens']:,} tokens with {result['anchors']} anchors, "
        f"source {result['source']}, {result['device']}"
    )
    return two_columns(title, rows)
