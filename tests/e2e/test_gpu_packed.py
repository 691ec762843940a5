"""Packed rows on the GPU's kernels: as if alone, within the noise of two batchings."""

import pytest
import torch

from draftsmith.config import TargetConfig
from draftsmith.target.load import load_target, text_decoder
from draftsmith.target.packed import pack, packed
from draftsmith.target.taps import capture
from tiny_models import assets

pytestmark = pytest.mark.gpu
LENGTHS = (37, 64, 91, 5, 1, 130, 300, 64)


def states(decoder, **inputs) -> torch.Tensor:
    layers = list(range(len(decoder.layers)))
    with capture(decoder, layers) as seen, torch.no_grad():
        decoder(use_cache=False, **inputs)
    return torch.stack([seen[i] for i in layers], dim=2).float()


def relative(mine: torch.Tensor, want: torch.Tensor) -> float:
    """|difference| / |want| over all tokens, the worst layer."""
    return float(((mine - want).norm(dim=(0, 2)) / want.norm(dim=(0, 2))).max())


def loaded(dtype: str):
    target = TargetConfig(model=str(assets() / "tiny-hybrid"), dtype=dtype, device="cuda")
    model = load_target(target)
    return model, text_decoder(model)


def in_a_row(model, decoder, samples) -> list[torch.Tensor]:
    row = pack(samples, pad_to=1024, device="cuda")
    with packed(model, decoder, row):
        got = states(decoder, input_ids=row.input_ids, position_ids=row.position_ids)[0]
    return [got[row.bounds[i] : row.bounds[i + 1]] for i in range(len(samples))]


def alone(decoder, samples) -> list[torch.Tensor]:
    return [states(decoder, input_ids=torch.tensor([x], device="cuda"))[0] for x in samples]


def worst(mine: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(relative(a, b) for a, b in zip(mine, want, strict=True))


def test_packed_rows_on_fla_kernels():
    """In fp32 as Transformers' own layers alone; in bf16 as near to fp32 as those are in bf16."""
    pytest.importorskip("fla")
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, 3000, (n,), generator=generator).tolist() for n in LENGTHS]
    exact, rounded = loaded("float32"), loaded("bfloat16")
    truth = alone(exact[1], samples)
    error = worst(in_a_row(*exact, samples), truth)
    mine, theirs = (
        worst(in_a_row(*rounded, samples), truth),
        worst(alone(rounded[1], samples), truth),
    )
    print(f"float32: packed {error:.2e}; from it, bfloat16: packed {mine:.2e}, alone {theirs:.2e}")
    assert error < 5e-3
    assert mine < 1.1 * theirs
