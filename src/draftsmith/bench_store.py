"""`draftsmith bench store`: rates at which a store is written and read, for each codec, beside what the
same disk does with plain files of the same size in the same minute.
"""

import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.config import Codec
from draftsmith.core import Sample, UserError
from draftsmith.features import StoreSource
from draftsmith.places import Place
from draftsmith.store import index, shards
from draftsmith.store.codec import STATES
from draftsmith.store.shards import KIND, SampleFeatures, shard_name, write_shard

TOKENS, SHARD_BYTES = 512, 256 << 20


def run(
    folder: Path, *, num_bytes: int, hidden: int, taps: int, states: Path | None, as_json: bool
) -> None:
    """Measure and print. `states`: a shard (codec none) whose states are used, else synthetic ones."""
    source = _real(states) if states else _synthetic(hidden, taps)
    folder.mkdir(parents=True, exist_ok=True)
    if num_bytes * 2 > shutil.disk_usage(folder).free:
        raise UserError(
            where=str(folder),
            found="too little room",
            expected=f"{num_bytes * 2 / 1e9:.1f} GB",
            remedy="Use --folder or --bytes.",
        )
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder) as scratch:
        disk = _disk(Path(scratch), num_bytes)
        rows = [_codec(Path(scratch), codec, source, num_bytes, disk) for codec in STATES]
    result = {
        "folder": str(folder),
        "states": str(states or "synthetic"),
        "disk_write_mb_s": disk[0],
        "disk_read_mb_s": disk[1],
        "threads": torch.get_num_threads(),
        "codecs": rows,
    }
    print(json.dumps(result, indent=1) if as_json else _table(result))


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
    """Rates in MB/s of the disk itself: shards' sizes written and synced, then read uncached."""
    block = memoryview(os.urandom(SHARD_BYTES))
    names = [f"plain-{i}" for i in range(max(1, num_bytes // SHARD_BYTES))]
    place = places.at(folder)
    written = _seconds(lambda: [place.put_new(name, [block]) for name in names])
    drop_cache(folder)
    buffer = memoryview(bytearray(SHARD_BYTES))
    read = _seconds(lambda: [place.read_into(name, 0, buffer) for name in names])
    for name in names:
        (folder / name).unlink()
    size = len(names) * SHARD_BYTES / 1e6
    return size / written, size / read


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
    rows = features.plan(tokens_per_batch=4096, seed=0, epoch=0).rows
    read = _seconds(lambda: [b.num_tokens for b in features.batches(rows, pinned=False)])
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
    """Make the next read of these files come from the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
