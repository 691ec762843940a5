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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_on_fla_kernels(dtype):
    pytest.importorskip("fla")
    target = TargetConfig(model=str(assets() / "tiny-hybrid"), dtype=dtype, device="cuda")
    model = load_target(target)
    decoder = text_decoder(model)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, 3000, (n,), generator=generator).tolist() for n in LENGTHS]
    row = pack(samples, pad_to=1024, device="cuda")
    with packed(model, decoder, row):
        got = states(decoder, input_ids=row.input_ids, position_ids=row.position_ids)[0]
    padded = torch.zeros(len(samples), max(LENGTHS), dtype=torch.long, device="cuda")
    for i, sample in enumerate(samples):
        padded[i, : len(sample)] = torch.tensor(sample)
    batch = states(decoder, input_ids=padded)
    floors, errors = [], []
    for i, sample in enumerate(samples):
        alone = states(decoder, input_ids=torch.tensor([sample], device="cuda"))[0]
        floors.append(relative(batch[i, : len(sample)], alone))
        errors.append(relative(got[row.bounds[i] : row.bounds[i + 1]], alone))
    print(f"{dtype}: packed {max(errors):.2e}, noise floor of two batchings {max(floors):.2e}")
    bound = 5e-3 if dtype == "float32" else 3 * max(floors) + 5e-3
    assert max(errors) < bound
