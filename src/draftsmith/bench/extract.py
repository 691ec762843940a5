"""`draftsmith bench extract`: how fast this machine extracts features from a target of any size, beside
what its matrix products alone would take.

Random weights and tokens, lengths drawn from a log-normal distribution (or equal ones with --sigma 0), the
same rows, forward and writer as the stage itself. The ceiling is the row's own matrix products,
replayed alone on tensors of the same shapes, interleaved with the runs, median of 5. Ratios hold
within one run: GPUs change their clocks.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from draftsmith import places
from draftsmith.bench.clock import (
    device_within,
    free_bytes,
    scratch_in,
    time_of,
    two_columns,
    wait_for,
    where_time_goes,
)
from draftsmith.bench.models import BUILT_IN, config_of, random_target
from draftsmith.config import Codec
from draftsmith.core import RowPlan, Sample, UserError
from draftsmith.extract.plan import plan_shards
from draftsmith.extract.worker import AHEAD, run_shards
from draftsmith.store.shards import KIND, SampleFeatures
from draftsmith.store.writer import ShardWriter
from draftsmith.target.forward import StatesForward
from draftsmith.target.packed import can_pack, has_kernels
from draftsmith.target.rows import plan_packed_rows, plan_rows
from draftsmith.target.selftest import self_test
from draftsmith.target.taps import auto_taps

REPEATS = 5
SEEN_TOKENS = 16
SPARE_ROWS = 2
WARM_ROWS = 4


def run(
    *,
    model: str,
    taps: list[int] | None,
    median: int,
    sigma: float,
    longest: int,
    row_tokens: int,
    num_rows: int,
    rows: str,
    codec: Codec,
    folder: Path,
    shard_bytes: int,
    memory_gib: float | None,
    as_json: bool,
) -> None:
    """Measure and print."""
    free_bytes(folder)  # a bad folder is refused before a target is made
    device, dtype = device_within(memory_gib)
    config = config_of(model)
    packed = _packed(rows, config.model_type, device)
    begun = time.monotonic()
    target = random_target(config, device, dtype)
    wait_for(device)
    built_s = time.monotonic() - begun
    layers = config.num_hidden_layers
    taps = taps or (BUILT_IN[model][0] if model in BUILT_IN else auto_taps(layers, 5))
    samples, plan = _planned(
        median, sigma, longest, row_tokens, num_rows, packed, config.vocab_size
    )
    forward = StatesForward(target, taps, "none", dtype, row_tokens=row_tokens if packed else None)
    begun = time.monotonic()
    checked = self_test(forward, samples) if packed else None
    planned = [[samples[i] for i in row] for row in plan.rows]
    forward(planned[0]).features()
    warm_s = time.monotonic() - begun
    products = _products(forward, _tokens_of(planned[0], row_tokens, packed))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ceilings, _ = [time_of(products, device) for _ in range(2)], wait_for(device)
    token_bytes = len(taps) * config.hidden_size * dtype.itemsize
    lengths = [len(s.input_ids) for s in samples]
    shards = plan_shards(plan, lengths, token_bytes, shard_bytes)
    few = plan_shards(replace(plan, rows=plan.rows[:WARM_ROWS]), lengths, token_bytes, shard_bytes)
    _write(
        forward, samples, few, codec, folder
    )  # memory that is touched for the first time is slow
    whole, waited = _write(forward, samples, shards, codec, folder)
    row_s = []
    for _ in range(REPEATS):
        row_s.append(time_of(lambda: forward(planned[0]), device))
        ceilings.append(time_of(products, device))
    real = plan.num_tokens
    row_real = sum(len(s.input_ids) for s in planned[0])
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": model,
        "taps": taps,
        "rows": "packed" if packed else "padded",
        "row_tokens": row_tokens,
        "median_tokens": median,
        "sigma": sigma,
        "samples": len(samples),
        "tokens": real,
        "fill": real / plan.padded_tokens,
        "built_s": built_s,
        "first_row_s": warm_s,
        "tokens_per_s": real / whole,
        "samples_per_s": len(samples) / whole,
        "bytes_per_s": real * token_bytes / whole,
        "writer_wait_share": waited / whole,
        "row_tokens_per_s": row_real / statistics.median(row_s),
        "ceiling_tokens_per_s": row_real / statistics.median(ceilings[2:]),
        "row_share_of_ceiling": statistics.median(ceilings[2:]) / statistics.median(row_s),
        "self_test": checked,
    }
    result["share_of_ceiling"] = result["tokens_per_s"] / result["ceiling_tokens_per_s"]
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
        result |= _profile(forward, planned[: 2 * AHEAD])
    print(json.dumps(result, indent=1) if as_json else _table(result))


def _packed(rows: str, model_type: str, device: torch.device) -> bool:
    if rows == "packed" and not can_pack(model_type):
        raise UserError(
            where="--rows",
            found=f"packed, for a model of type {model_type}",
            expected="a family that is proven packed",
            remedy="Use --rows padded.",
        )
    if rows != "auto":
        return rows == "packed"
    return device.type == "cuda" and can_pack(model_type) and has_kernels(model_type)


def _planned(
    median: int,
    sigma: float,
    longest: int,
    row_tokens: int,
    num_rows: int,
    packed: bool,
    vocab: int,
) -> tuple[list[Sample], RowPlan]:
    """Samples and their rows: the fullest of a few more, since a real plan's last window is a small
    part of it and here would be most.
    """
    spare = SPARE_ROWS if packed else 0
    drawn = _samples(median, sigma, longest, row_tokens * (num_rows + spare), vocab)
    plan = (plan_packed_rows if packed else plan_rows)(
        [len(s.input_ids) for s in drawn], tokens_per_batch=row_tokens, seed=0
    )

    def held(row: list[int]) -> int:
        return sum(len(drawn[i].input_ids) for i in row)

    fullest = sorted(plan.rows, key=held, reverse=True)[:num_rows] if packed else plan.rows
    number = {i: n for n, i in enumerate(i for row in fullest for i in row)}
    samples = [Sample(n, drawn[i].input_ids, drawn[i].loss_mask) for i, n in number.items()]
    rows = [[number[i] for i in row] for row in fullest]
    padded = row_tokens * len(rows) if packed else plan.padded_tokens
    return samples, RowPlan(rows=rows, num_tokens=sum(map(held, fullest)), padded_tokens=padded)


def _tokens_of(row: list[Sample], row_tokens: int, packed: bool) -> int:
    """Of the row as it runs, padding included."""
    lengths = [len(s.input_ids) for s in row]
    return max(row_tokens, sum(lengths)) if packed else len(row) * max(lengths)


def _samples(median: int, sigma: float, longest: int, tokens: int, vocab: int) -> list[Sample]:
    """Random samples of log-normal length, about `tokens` tokens in all."""
    generator = torch.Generator().manual_seed(0)
    out: list[Sample] = []
    while tokens > 0:
        drawn = torch.exp(torch.randn(1, generator=generator) * sigma) * median
        length = min(max(16, int(drawn)), longest, max(16, tokens))
        ids = torch.randint(vocab, (length,), generator=generator).tolist()
        out.append(Sample(len(out), ids, [1] * length))
        tokens -= length
    return out


def _write(
    forward: StatesForward,
    samples: list[Sample],
    shards: list[list[list[int]]],
    codec: Codec,
    folder: Path,
) -> tuple[float, float]:
    """The stage's own loop, to the last byte written: seconds, and those of them that the forward
    waited for the writer.
    """
    room = free_bytes(folder)
    hidden = forward.model.config.get_text_config().hidden_size
    tokens = sum(len(samples[i].input_ids) for rows in shards for row in rows for i in row)
    need = tokens * len(forward.taps) * hidden * forward.dtype.itemsize
    if need > room:
        raise UserError(
            where="--folder",
            found=f"{room / 1e9:.1f} GB free in {folder}",
            expected=f"{need / 1e9:.1f} GB",
            remedy="Use fewer --num-rows or another --folder.",
        )
    loaded = ((n, [[samples[i] for i in row] for row in rows]) for n, rows in enumerate(shards))
    with scratch_in(folder) as scratch:
        said = {"kind": KIND, "inputs": "bench"}
        begun = time.monotonic()
        with _TimedWriter(places.at(scratch), codec, said, lambda *a, **k: None) as writer:
            run_shards(forward, loaded, writer, lambda said: None)
        return time.monotonic() - begun, writer.waited_s


class _TimedWriter(ShardWriter):
    """One that knows how long it was waited for."""

    waited_s = 0.0

    def put(self, name: str, samples: list[SampleFeatures]) -> None:
        begun = time.monotonic()
        super().put(name, samples)
        self.waited_s += time.monotonic() - begun


def _products(forward: StatesForward, tokens: int) -> Callable[[], None]:
    """The matrix products that a row of so many tokens makes, as a function that makes them alone. They
    are seen on a short padded row, which runs no compiled function: those hide them.
    """
    seen: list[Tensor] = []

    def see(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(module.weight)

    handles = [
        module.register_forward_hook(see)
        for module in forward.decoder.modules()
        if isinstance(module, nn.Linear)
    ]
    forward.launch([Sample(-1, [1] * SEEN_TOKENS, [1] * SEEN_TOKENS)], None).features()
    for handle in handles:
        handle.remove()
    assert seen, "a decoder has matrix products"
    widths = {weight.shape[1] for weight in seen}
    like = {"device": seen[0].device, "dtype": seen[0].dtype}
    inputs = {width: torch.randn(tokens, width, **like) for width in widths}

    def replay() -> None:
        with torch.inference_mode():
            for weight in seen:
                F.linear(inputs[weight.shape[1]], weight)

    return replay


def _profile(forward: StatesForward, rows: list[list[Sample]]) -> dict[str, Any]:
    """Where the GPU's time goes, and the share of it that it has nothing to do while rows follow
    each other.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        underway = [forward(row) for row in rows[:AHEAD]]
        for row in rows[AHEAD:]:
            underway.append(forward(row))
            underway.pop(0).features()
        for states in underway:
            states.features()
        torch.cuda.synchronize()
    return where_time_goes(seen)


def _table(result: dict[str, Any]) -> str:
    rows = [
        ("tokens/s, to the last byte written", f"{result['tokens_per_s']:,.0f}"),
        ("share of the ceiling", f"{result['share_of_ceiling']:.1%}"),
        ("  ceiling: the row's matrix products alone", f"{result['ceiling_tokens_per_s']:,.0f}"),
        ("  one row without writing", f"{result['row_tokens_per_s']:,.0f}"),
        ("samples/s", f"{result['samples_per_s']:,.1f}"),
        ("bytes written/s", f"{result['bytes_per_s'] / 1e6:,.0f} MB"),
        ("waited for the writer", f"{result['writer_wait_share']:.1%}"),
        ("rows filled", f"{result['fill']:.1%}"),
        ("weights made, first row", f"{result['built_s']:.0f} s, {result['first_row_s']:.0f} s"),
    ]
    if "gpu_idle_share" in result:
        rows.append(("GPU idle", f"{result['gpu_idle_share']:.1%}"))
        rows.append(("peak memory", f"{result['peak_gib']:.1f} GiB"))
        rows += [(f"  {kind}", f"{share:.1%}") for kind, share in result["by_kind"].items()]
    title = (
        f"{result['model']}, {result['rows']} rows of {result['row_tokens']:,} tokens, median "
        f"{result['median_tokens']}, {result['device']}"
    )
    return two_columns(title, rows)
