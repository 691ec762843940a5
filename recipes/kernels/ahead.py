"""Compile, without a GPU, every Triton kernel that a packed row of a Gated DeltaNet model launches, for
Hopper (sm_90) and for the RTX PRO 6000 (sm_120), and see which of its tunings fit the card's shared memory.

    pip install triton==3.6.0 fla-core==0.6.0 einops --no-deps --target KERNELS
    PYTHONPATH=KERNELS:src python recipes/kernels/ahead.py

Keep KERNELS out of the environment that runs the tests: once fla can be imported, Transformers calls it for
CPU tensors too. fla's functions are called as `target/packed.py` calls them, at Qwen3.6-27B's dimensions, on
CPU tensors; a driver that only answers questions stands in for the GPU's, and a launch is a compilation.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

KILOBYTE = 1024
CARDS = {
    90: {"max_shared_mem": 227 * KILOBYTE, "multiprocessor_count": 132, "name": "NVIDIA H200"},
    120: {
        "max_shared_mem": 99 * KILOBYTE,
        "multiprocessor_count": 188,
        "name": "NVIDIA RTX PRO 6000",
    },
}
TOKENS, KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 1024, 16, 48, 128, 4


def main() -> None:
    """A process an architecture: fla looks at the device when it is imported."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, choices=CARDS)
    args = parser.parse_args()
    if args.arch:
        print(json.dumps(compiled(args.arch)))
        return
    wrong = 0
    print("| kernel | card | tunings | fit | shared memory, KB |")
    print("|---|---|---|---|---|")
    for arch, card in CARDS.items():
        out = subprocess.run(
            [sys.executable, __file__, "--arch", str(arch)], check=True, stdout=subprocess.PIPE
        )
        for name, sizes in json.loads(out.stdout.splitlines()[-1]).items():
            fit = sum(size <= card["max_shared_mem"] for size in sizes)
            wrong += not fit
            span = f"{min(sizes) / KILOBYTE:.0f}-{max(sizes) / KILOBYTE:.0f}"
            print(f"| {name} | sm_{arch} | {len(sizes)} | {fit} | {span} |")
    sys.exit(f"{wrong} kernels fit with no tuning" if wrong else 0)


def compiled(arch: int) -> dict[str, list[int]]:
    """Bytes of shared memory a block of each kernel, in each of its tunings."""
    card = CARDS[arch]
    found: dict[str, list[int]] = defaultdict(list)
    pretend(arch, card)
    record(found)
    packed_layer()
    return dict(sorted(found.items()))


def pretend(arch: int, card: dict[str, Any]) -> None:
    """This card is the one that Triton, torch and fla see."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch, 32)
    utils = SimpleNamespace(get_device_properties=lambda index: card)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            utils=utils,
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    torch.cuda.get_device_capability = lambda *args: divmod(arch, 10)
    torch.cuda.get_device_name = lambda *args: card["name"]
    torch.cuda.device_count = lambda: 1


def record(found: dict[str, list[int]]) -> None:
    """Launches become compilations: of every tuning, where there are several."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found[self.fn.__name__].append(kernel.metadata.shared)
        return kernel

    def every_tuning(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for tuning in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **tuning.all_kwargs())

    JITFunction.run, Autotuner.run = compile_only, every_tuning


def packed_layer() -> None:
    """The mixer's part of one layer over a packed row: convolution and chunk rule."""
    import torch

    from draftsmith.target.conv_triton import conv_split
    from draftsmith.target.packed import _fla_conv, _fla_rule, pack

    row = pack([[0] * 300, [0] * 37, [0] * 600], pad_to=TOKENS)
    channels = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
    x = torch.zeros(1, channels, TOKENS, dtype=torch.bfloat16)
    conv = _fla_conv(row)
    weight = torch.zeros(channels, TAPS, dtype=torch.bfloat16)
    conv(x, weight, None, "silu")
    sizes = (KEY_HEADS, WIDTH, VALUE_HEADS, WIDTH)
    conv_split(x.transpose(1, 2).contiguous(), weight, row.position_ids[0], sizes)
    q, k, v = (torch.zeros(1, TOKENS, VALUE_HEADS, WIDTH, dtype=torch.bfloat16) for _ in "qkv")
    g = torch.zeros(1, TOKENS, VALUE_HEADS)
    beta = torch.zeros(1, TOKENS, VALUE_HEADS, dtype=torch.bfloat16)
    _fla_rule(row)(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)


if __name__ == "__main__":
    main()
