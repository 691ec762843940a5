"""The Triton kernels against the torch rule: in Triton's interpreter without a GPU, compiled ahead of time
for sm_90 and sm_120, and on a GPU where there is one.
"""

import pytest
import torch

from draftsmith.decode.gdn import Block, Stash, gdn_block
from triton_interpreter import interpreted

triton = pytest.importorskip("triton")

INTERPRETED = """
import torch
from test_gdn_triton import compare
compare(T=20, heads=(2, 4), dims=(16, 32), device="cpu", dtype=torch.float32, bound=2e-6)
compare(T=7, heads=(1, 3), dims=(32, 64), device="cpu", dtype=torch.float32, bound=2e-6, chain=True)
compare(T=33, heads=(1, 1), dims=(16, 32), device="cpu", dtype=torch.bfloat16, bound=2e-6)
"""


def inputs(T, heads, dims, device, dtype, seed=0):
    """q, k, v, g, beta, strided as a model's projections are, and a state."""
    generator = torch.Generator().manual_seed(seed)
    (HK, H), (K, V) = heads, dims
    mixed = torch.randn(1, T, HK * 2 * K + H * V, generator=generator).to(device, dtype)
    q, k, v = mixed.split([HK * K, HK * K, H * V], dim=-1)
    q, k, v = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (H, V))
    g = -2 * torch.rand(1, T, H, generator=generator).to(device)
    beta = torch.rand(1, T, H, generator=generator).to(device, dtype)
    state = torch.randn(1, H, K, V, generator=generator).to(device)
    return (q, k, v, g, beta), state


def tree(T: int, chain: bool, device: str) -> tuple[list[int], torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(T)
    parents = [-1] + [
        i - 1 if chain else int(torch.randint(max(0, i - 6), i, (), generator=generator))
        for i in range(1, T)
    ]
    path = [T - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return parents, Block.of(parents, torch.device(device)).seen, path


def compare(T, heads, dims, device, dtype, bound, chain=False) -> None:
    """Outputs, stash and folded state against the torch rule in fp64 on the same inputs."""
    from draftsmith.decode import gdn_triton

    args, state = inputs(T, heads, dims, device, dtype)
    _, seen, path = tree(T, chain, device)
    before = state.clone()
    assert gdn_triton.fits(args[0], args[2], state)
    out, k, u, decay = gdn_triton.block(*args, state, seen)
    assert torch.equal(state, before), "verifying does not move the state"
    want, stash = gdn_block(*(x.double() for x in args), state.double(), seen)
    got = {"out": out, "k": k, "u": u, "decay": decay}
    wanted = {"out": want, "k": stash.k, "u": stash.u, "decay": stash.log_decay}
    for name, x in got.items():
        error = (x.double() - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < bound, f"{name}: {error}"
    folded = state.double()
    stash.fold(folded, torch.tensor(path, device=device))
    gdn_triton.fold(state, k, u, decay, torch.tensor(path, device=device))
    assert (state.double() - folded).abs().max() / folded.abs().max() < bound


def test_interpreted_the_kernels_are_the_torch_rule():
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr


def compiled(arch: int, kernel: str, T: int):
    """Ahead of time, at Qwen3.6-27B's dims."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftsmith.decode import gdn_triton

    function = getattr(gdn_triton, kernel)
    narrow = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "beta": "*bf16", "seen": "*i8", "path": "*i64",
              "eps": "fp32"}  # fmt: skip
    if kernel == "fold_kernel":
        narrow.pop("k")
    tiles = gdn_triton.tiles(T, 128)
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"K": 128, "V": 128, "BLOCK_P": T, "PRECISION": gdn_triton.PRECISION, **tiles}
    pointers = {"g", "state", "out", "k_out", "u_out", "decay_out", "k", "u", "decay"}
    signature = {
        name: "constexpr" if name in constants
        else narrow.get(name, "*fp32" if name in pointers else "i32")
        for name in function.arg_names
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    source = ASTSource(function, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("kernel", ["block_kernel", "fold_kernel"])
@pytest.mark.parametrize("arch", [90, 120])
def test_compiled_ahead_of_time_they_fit_every_gpu(arch, kernel, monkeypatch):
    for T in (16, 64, 128):
        made = compiled(arch, kernel, T)
        assert made.asm["cubin"], "ptxas took it"
        assert made.metadata.shared <= 99 * 1024, f"{made.metadata.shared} bytes of shared memory"


def test_64_nodes_at_27b_dims_leave_a_stash_of_at_most_170_mb():
    args, state = inputs(64, (16, 48), (128, 128), "cpu", torch.float32)
    _, stash = gdn_block(*args, state, tree(64, False, "cpu")[1])
    size = sum(x.numel() * x.element_size() for x in (stash.k, stash.u, stash.log_decay))
    assert isinstance(stash, Stash) and 48 * size <= 170e6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [2, 16, 17, 64, 65])
def test_on_a_gpu_they_are_the_torch_rule(T, dtype):
    for chain in (True, False):
        compare(T, (16, 48), (128, 128), "cuda", dtype, 5e-6, chain=chain)
