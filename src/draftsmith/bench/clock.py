"""Where a benchmark writes, how long work takes on a device, where a GPU's time goes, and a table of it."""

import contextlib
import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from draftsmith.core import UserError

KINDS = {  # kernels by what their names say
    "attention": ("flash", "fmha", "attention"),  # whose names say cutlass too
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "matmul", "splitkreduce"),
    "recurrence": ("chunk_", "delta", "solve_tril", "recompute_w", "cumsum", "l2norm"),
    "convolution": ("conv",),
    "copies": ("memcpy", "memset", "copy_kernel", "direct_copy"),
    "compiled": ("triton_",),
}


def device_within(memory_gib: float | None) -> tuple[torch.device, torch.dtype]:
    """This machine's GPU, its allocator held to so much, and bf16; or the CPU and fp32."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), torch.float32
    device = torch.device("cuda")
    if memory_gib:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * (1 << 30) / total))
    return device, torch.bfloat16


def free_bytes(folder: Path) -> int:
    """Of the disk of --folder, which is made. Raises UserError where nothing can be written."""
    with _place(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free


@contextlib.contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """A folder of its own below --folder, gone afterwards. Raises as free_bytes."""
    with _place(folder):
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="draftsmith-bench-", dir=folder)
    with made as scratch:
        yield Path(scratch)


@contextlib.contextmanager
def _place(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            where=f"--folder {folder}",
            found=f"no place to write ({error.strerror})",
            expected="a folder on the disk to measure",
            remedy="Choose another --folder.",
        ) from None


def time_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds, to the last kernel."""
    wait_for(device)
    begun = time.monotonic()
    work()
    wait_for(device)
    return time.monotonic() - begun


def wait_for(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernels_of(seen: profile) -> list[Any]:
    """What ran on the GPU, copies included."""
    return [e for e in seen.events() or [] if str(e.device_type).endswith("CUDA")]


def busy_seconds(work: Callable[[], Any]) -> float:
    """For which the GPU has anything to do in this work: the same without the CPU's waits between
    kernels.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end) for e in kernels_of(seen)]
    return _union(spans) / 1e6


def _union(spans: list[tuple[float, float]]) -> float:
    """Length covered by these spans."""
    busy, end = 0.0, -math.inf
    for begin, until in sorted(spans):
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return busy


def where_time_goes(seen: profile) -> dict[str, Any]:
    """Shares by kind of kernel, the largest kernels, and the share of time that no kernel runs."""
    kernels = kernels_of(seen)
    times: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    spans = []
    for event in kernels:
        span = (event.time_range.start, event.time_range.end)
        if "memcpy dtoh" in event.name.lower():
            times["copies to the CPU (beside the rest)"] += span[1] - span[0]
            continue
        spans.append(span)
        times[_kind(event.name)] += span[1] - span[0]
        names[event.name[:80]] += span[1] - span[0]
    whole = max(until for _, until in spans) - min(begin for begin, _ in spans)
    total = sum(times.values())
    largest = sorted(names.items(), key=lambda item: -item[1])[:25]
    return {
        "gpu_idle_share": 1 - _union(spans) / whole,
        "by_kind": {k: v / total for k, v in sorted(times.items(), key=lambda kv: -kv[1])},
        "largest_kernels": {name: t / total for name, t in largest},
    }


def _kind(name: str) -> str:
    low = name.lower()
    for kind, words in KINDS.items():
        if any(word in low for word in words):
            return kind
    return "other elementwise"


def two_columns(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and values, as text."""
    grid = Table(title=title, show_header=False)
    for row in rows:
        grid.add_row(*row)
    console = Console(width=110)
    with console.capture() as text:
        console.print(grid)
    return text.get()
