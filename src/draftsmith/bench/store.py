"""`draftsmith bench store`: rates at which a store is written and read, for each codec, beside what the
same disk does with plain files of the same size in the same minute.
"""

import ctypes
import io
import json
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith import files, places
from draftsmith import manifest as manifests
from draftsmith.bench.clock import free_bytes, scratch_in
from draftsmith.config import Codec
from draftsmith.core import Sample, UserError
from draftsmith.features import THREADS, StoreSource, epoch_plan
from draftsmith.places import Place
from draftsmith.plan import rates as rates_file
from draftsmith.store import index, shards
from draftsmith.store.codec import STATES
from draftsmith.store.shards import KIND, SampleFeatures, shard_name, write_shard

TOKENS, SHARD_BYTES = 512, 256 << 20
MOST_CACHED = 0.02


def run(
    folder: Path,
    *,
    num_bytes: int,
    hidden: int,
    taps: int,
    states: Path | None,
    repeats: int,
    rates: Path | None,
    as_json: bool,
) -> None:
    """Measure and print. `states`: a shard (codec none) whose states are used, else synthetic ones."""
    source = _real(states) if states else _synthetic(hidden, taps)
    if num_bytes * 2 > free_bytes(folder):
        raise UserError(
            where=str(folder),
            found="too little room",
            expected=f"{num_bytes * 2 / 1e9:.1f} GB",
            remedy="Use --folder or --bytes.",
        )
    rounds = []
    with scratch_in(folder) as scratch:
        for _ in range(repeats):  # the disk and every codec in the same minute
            disk = _disk(scratch, num_bytes)
            codecs = [_codec(scratch, codec, source, num_bytes, disk) for codec in STATES]
            rounds.append({"disk_write_mb_s": disk[0], "disk_read_mb_s": disk[1], "codecs": codecs})
    result = {
        "folder": str(folder),
        "states": str(states or "synthetic"),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        **_median(rounds),
    }
    if rates is not None:
        _write_rates(rates, result)
    print(json.dumps(result, indent=1) if as_json else _table(result))


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all numbers over the rounds, and the least and most of the rates."""
    out: dict[str, Any] = {}
    for name, value in rounds[0].items():
        if isinstance(value, list):
            columns = zip(*(one[name] for one in rounds), strict=True)
            out[name] = [_median(list(column)) for column in columns]
        elif isinstance(value, str):
            out[name] = value
        else:
            values = [one[name] for one in rounds]
            out[name], out[f"{name}_range"] = statistics.median(values), [min(values), max(values)]
    return out


def _write_rates(path: Path, result: dict[str, Any]) -> None:
    """The disk's rates into a file of rates for `draftsmith plan`, whose other rates stay."""
    known = rates_file.read(path) if path.exists() else {}
    disk = {name: result[name] for name in ("disk_write_mb_s", "disk_read_mb_s")}
    files.write_json(path, {**known, **disk})


def _synthetic(hidden: int, taps: int) -> list[Tensor]:
    """Samples of bf16 states like a language model's: channels of log-normal scale, three massive
    ones, and a massive first token.
    """
    generator = torch.Generator().manual_seed(0)
    channels = torch.exp(0.6 * torch.randn(taps, hidden, generator=generator))
    channels[:, :: max(1, hidden // 3)] *= 80
    out = []
    for _ in range(8):
        states = torch.randn(TOKENS, taps, hidden, generator=generator) * channels
        states[0] *= 60
        out.append(states.bfloat16())
    return out


def _real(path: Path) -> list[Tensor]:
    place = places.at(path.parent)
    shard = shards.open_shard(place, path.name)
    if shard.codec != "none":
        raise UserError(
            where=str(path),
            found=f"codec {shard.codec}",
            expected="a shard of codec none",
            remedy="Choose another shard.",
        )
    states = shards.read_tensors(place, path.name, shard.header, ["hidden"])["hidden"]
    lengths = shard.small["offsets"].diff().tolist()
    return list(states.split(lengths))


def _disk(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Rates in MB/s of the disk itself: shards' sizes written and synced, then read uncached, by one
    thread and by as many as the trainer's reader has: the faster of the two.
    """
    block = memoryview(os.urandom(SHARD_BYTES))
    names = [f"plain-{i}" for i in range(max(1, num_bytes // SHARD_BYTES))]
    place = places.at(folder)
    written = _seconds(lambda: [place.put_new(name, [block]) for name in names])
    read = float("inf")
    for threads in (1, THREADS):
        drop_cache(folder)
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_read, [place] * threads, [names[t::threads] for t in range(threads)]))
        read = min(read, time.perf_counter() - start)
    for name in names:
        (folder / name).unlink()
    size = len(names) * SHARD_BYTES / 1e6
    return size / written, size / read


def _read(place: Place, names: list[str]) -> None:
    buffer = memoryview(bytearray(SHARD_BYTES))
    for name in names:
        place.read_into(name, 0, buffer)


def _codec(
    folder: Path, codec: Codec, source: list[Tensor], num_bytes: int, disk: tuple[float, float]
) -> dict[str, Any]:
    """Write a store of `num_bytes` of states and read it in shuffled micro-batches."""
    place = places.at(folder / codec)
    samples, total = [], 0
    while total < num_bytes:
        states = source[len(samples) % len(source)]
        sample = Sample(len(samples), [7] * len(states), [1] * len(states))
        samples.append(SampleFeatures(sample, states, {}))
        total += states.nbytes
    taps, hidden = source[0].shape[1:]
    inputs = {"target": {"hidden_size": hidden}, "taps": list(range(taps)), "codec": codec}
    inputs |= {"dtype": str(source[0].dtype).removeprefix("torch."), "final": "none"}
    written = _seconds(lambda: _write(place, samples, codec, inputs))
    stored = sum(path.stat().st_size for path in (folder / codec).iterdir())
    drop_cache(folder / codec)
    features = StoreSource(place, [s.sample.sample_id for s in samples])
    rows = epoch_plan(features.lengths, budget=4096, seed=0, epoch=0).rows
    read = _seconds(lambda: list(features.batches(rows, pinned=False)))
    shutil.rmtree(folder / codec)
    return {
        "codec": codec,
        "size": stored / total,
        "write_mb_s": total / 1e6 / written,
        "read_mb_s": total / 1e6 / read,
        "write_share_of_disk": stored / 1e6 / written / disk[0],
        "read_share_of_disk": stored / 1e6 / read / disk[1],
    }


def _write(
    place: Place, samples: list[SampleFeatures], codec: Codec, inputs: dict[str, Any]
) -> None:
    manifest = manifests.begin(place, KIND, inputs, remake=False)
    said = shards.about(inputs)
    per_shard = max(1, SHARD_BYTES // samples[0].hidden.nbytes)
    names = []
    for first in range(0, len(samples), per_shard):
        names.append(shard_name(len(names)))
        write_shard(place, names[-1], samples[first : first + per_shard], codec, said)
    manifests.finish(place, manifest, index.entries(place, names, said), {})


def drop_cache(folder: Path) -> None:
    """Make the next read of these files come from the disk. Raises UserError where that cannot be."""
    for path in folder.iterdir():
        with open(path, "r+b") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = cached(file.fileno(), path.stat().st_size)
        if share > MOST_CACHED:
            raise UserError(
                where=str(path),
                found=f"{share:.0%} of the file still in memory after it was dropped from there",
                expected="a disk, whose rates can be measured",
                remedy="Use --folder on a disk (a file system in memory has none).",
            )


def cached(descriptor: int, size: int) -> float:
    """The share of a file's pages that lie in memory (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(
        descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE
    ) as view:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.addressof(ctypes.c_char.from_buffer(view))
        failed = libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages)
        assert not failed, f"mincore: {os.strerror(ctypes.get_errno())}"
        return sum(page & 1 for page in pages) / len(pages)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _table(result: dict[str, Any]) -> str:
    title = (
        f"{result['folder']}, {result['states']} states; the disk itself writes "
        f"{result['disk_write_mb_s']:.0f} MB/s and reads {result['disk_read_mb_s']:.0f} MB/s"
    )
    grid = Table(title=title)
    for column in ("codec", "size", "write MB/s", "of the disk", "read MB/s", "of the disk"):
        grid.add_column(column)
    for row in result["codecs"]:
        grid.add_row(
            row["codec"], f"{row['size']:.1%}", f"{row['write_mb_s']:.0f}",
            f"{row['write_share_of_disk']:.0%}", f"{row['read_mb_s']:.0f}",
            f"{row['read_share_of_disk']:.0%}",
        )  # fmt: skip
    out = io.StringIO()
    Console(width=110, file=out).print(grid)
    return out.getvalue() + (
        "MB/s of states as the trainer sees them; shares are of stored bytes against plain files."
    )
