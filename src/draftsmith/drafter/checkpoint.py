"""Drafters on disk in z-lab's layout: 11L + 3 unprefixed tensors and a config.json; every name and
shape checked.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.core import UserError
from draftsmith.drafter.config import DrafterShape, shape_from_zlab, zlab_config
from draftsmith.drafter.model import DFlash


def save_drafter(folder: Path, drafter: DFlash, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors into an existing folder (use files.new_folder to make
    it appear whole).
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    assert len(tensors) == 11 * drafter.shape.num_layers + 3, (
        "z-lab's layout has 11 tensors a layer and 3 more"
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = zlab_config(drafter.shape, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_shape(folder: Path) -> DrafterShape:
    """The shape of a checkpoint. Raises UserError when it is not a DFlash drafter."""
    path = folder / "config.json"
    try:
        return shape_from_zlab(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            where=str(path),
            found=f"no DFlash configuration ({type(error).__name__}: {error})",
            expected="a drafter in z-lab's layout",
            remedy="Check the path.",
        ) from error


def load_drafter(
    folder: Path,
    *,
    round_to: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DFlash:
    """A drafter without embedding and head: call share() next. `round_to` bfloat16 gives the values
    an export holds.
    """
    drafter = DFlash(read_shape(folder))
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(
            where=str(folder / "model.safetensors"),
            found=f"a file that does not load ({error})",
            expected="the drafter's weights",
            remedy="Check the path or train again.",
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        wrong = sorted(set(wanted.items()) ^ set(found.items()))[:4]
        raise UserError(
            where=str(folder),
            found=f"{len(found)} tensors, among them {wrong}",
            expected=f"the {len(wanted)} of z-lab's layout",
            remedy="Use an unmodified checkpoint.",
        )
    drafter.load_state_dict(
        {name: t.to(round_to or t.dtype).to(dtype) for name, t in tensors.items()}
    )
    return drafter.to(device, dtype).eval().requires_grad_(False)
