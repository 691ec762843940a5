"""How fast things go: rates that were measured or given, each with its source, and the constants that
stand in for those that were not.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.core import UserError

H200 = "measured on an H200, docs/plan.md"
UNITS = {
    "matmul_tflops": "TFLOP/s a GPU in large matrix products",
    "extract_share": "of it in extraction",
    "train_share": "of it in training",
    "decode_share": "of the memory's or the products' rate in decoding",
    "memory_gb_s": "GB/s a GPU, its own memory",
    "extract_tokens_per_s": "tokens/s a GPU",
    "train_slots_per_s": "block slots/s a GPU",
    "regenerate_tokens_per_s": "tokens/s a GPU",
    "link_gb_s": "GB/s a GPU, to the others of its node",
    "network_gb_s": "GB/s a node, to the others and to S3",
    "load_gb_s": "GB/s a worker, of the target's weights at its start",
    "disk_write_mb_s": "MB/s where the store is",
    "disk_read_mb_s": "MB/s where the store is",
}
"""Every rate that can be given, and its unit."""


@dataclass(frozen=True)
class Rate:
    """A number and where it is from."""

    value: float
    source: str


CONSTANTS = {
    "matmul_tflops": Rate(736, H200),
    "extract_share": Rate(0.79, H200),
    "train_share": Rate(0.69, H200),
    "decode_share": Rate(0.5, "assumed"),
    "memory_gb_s": Rate(4800, "an H200's data sheet"),
    "link_gb_s": Rate(450, "NVLink 4, data sheet; PCIe 5 x16: 64"),
    "network_gb_s": Rate(50, "assumed: 400 Gbit/s a node"),
    "load_gb_s": Rate(1, "assumed"),
}

Rates = dict[str, Rate]


def gather(given: Path | None, *, here: str | None) -> Rates:
    """The constants, this machine's own products when it is the one that is planned for (`here`: cuda
    or cpu), and over both what the file of rates says.
    """
    rates = dict(CONSTANTS)
    if here is not None:
        rates["matmul_tflops"] = Rate(measure_matmul(here) / 1e12, f"measured now, {here}")
    if here == "cpu":
        rates["memory_gb_s"] = Rate(10, "assumed of a CPU core")
    if given is not None:
        rates |= {name: Rate(value, str(given)) for name, value in read(given).items()}
    return rates


def read(path: Path) -> dict[str, float]:
    """A file of rates: one JSON object of the names in UNITS. Raises UserError for another."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unlike(path, f"no rates ({error})") from None
    if not isinstance(data, dict):
        raise _unlike(path, f"a {type(data).__name__}")
    for name, value in data.items():
        if name not in UNITS:
            raise _unlike(path, f"the unknown name '{name}'")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise _unlike(path, f"{name} {value!r}")
    return data


def _unlike(path: Path, found: str) -> UserError:
    return UserError(
        where=str(path),
        found=found,
        expected=f"a JSON object of numbers above 0 named {', '.join(UNITS)}",
        remedy="See docs/plan.md; `draftsmith bench store --rates FILE` writes one.",
    )


def measure_matmul(device: str) -> float:
    """FLOP/s of a large product: bf16 on a GPU, fp32 on a CPU; the best of some."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        product = a @ a
        product[0, 0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
