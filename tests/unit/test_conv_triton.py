"""The convolution kernel of packed rows against its torch version: in Triton's interpreter without a GPU,
compiled ahead of time for sm_90 and sm_120, and on a GPU where there is one.
"""

import pytest
import torch

from draftsmith.target.fused import normed_apart
from draftsmith.target.packed import _conv, pack
from triton_interpreter import interpreted

triton = pytest.importorskip("triton")

INTERPRETED = """
import torch
from test_conv_triton import compare
compare((2, 16, 4, 32), torch.float32, "cpu", 1e-6)
compare((1, 32, 3, 16), torch.bfloat16, "cpu", 1e-2)
"""
LENGTHS = (1, 2, 3, 40, 5, 1, 33)


def compare(sizes, dtype, device, bound) -> None:
    """Ragged samples, one shorter than the taps; channels that lie in a wider projection."""
    from draftsmith.target import conv_triton

    key_heads, K, heads, V = sizes
    row = pack([[1] * n for n in LENGTHS], device=device)
    widths = [key_heads * K, key_heads * K, heads * V]
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(1, sum(LENGTHS), sum(widths) + 48, generator=generator).to(device, dtype)
    weight = torch.randn(sum(widths), 4, generator=generator).to(device, dtype)
    x = wide[..., : sum(widths)]
    assert conv_triton.fits(sizes, weight, None, "silu")
    got = conv_triton.conv_split(x, weight, row.position_ids[0], sizes)
    y = _conv(row)(x.cpu().transpose(1, 2), weight.cpu(), None, activation="silu").transpose(1, 2)
    parts = zip(y.split(widths, dim=-1), (K, K, V), strict=True)
    wanted = normed_apart(*(part.unflatten(-1, (-1, d)) for part, d in parts))
    for mine, want in zip(got, wanted, strict=True):
        assert mine.shape == want.shape and mine.dtype == dtype and mine.is_contiguous()
        mine, want = mine.cpu().float(), want.float()
        assert (mine - want).abs().max() <= bound * want.abs().max()


def test_interpreted_the_kernel_is_the_torch_convolution():
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", [90, 120])
def test_compiled_ahead_of_time_it_fits_every_gpu(arch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftsmith.target.conv_triton import BLOCK_T, conv_kernel

    for norm in (True, False):
        constants = {"HEAD": 128, "W": 4, "NORM": norm, "BLOCK_T": BLOCK_T}
        pointers = {
            "x": "*bf16",
            "weight": "*bf16",
            "positions": "*i64",
            "out": "*bf16",
            "eps": "fp32",
        }
        signature = {
            name: "constexpr" if name in constants else pointers.get(name, "i32")
            for name in conv_kernel.arg_names
        }
        source = ASTSource(conv_kernel, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
        assert made.asm["cubin"], "ptxas took it"
        assert made.metadata.shared <= 99 * 1024, f"{made.metadata.shared} bytes of shared memory"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_on_a_gpu_it_is_the_torch_convolution(dtype, bound):
    compare((16, 128, 48, 128), dtype, "cuda", bound)
