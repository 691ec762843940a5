"""Drafters on disk in z-lab's layout: 11L + 3 unprefixed tensors and a config.json; every name and
shape checked. Published ones, speculators' too, come from a folder or from the hub.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core import UserError
from draftsmith.drafter.config import DrafterShape, zlab_config
from draftsmith.drafter.model import DFlash
from draftsmith.drafter.published import drafters_own, shape_from


def save_drafter(folder: Path, drafter: DFlash, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors into an existing folder (use files.new_folder to make
    it appear whole).
    """
    save_tensors(folder, drafter.state_dict(), drafter.shape, dtype)


def save_tensors(
    folder: Path, state: dict[str, Tensor], shape: DrafterShape, dtype: torch.dtype
) -> None:
    """The same of a state dict."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()
    }
    assert len(tensors) == 11 * shape.num_layers + 3, (
        "z-lab's layout has 11 tensors a layer and 3 more"
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = zlab_config(shape, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def find_drafter(source: str) -> Path:
    """The folder of a drafter given as a folder or as a hub id."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(source, allow_patterns=["config.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(
            where=source,
            found=f"no such folder, and not on the hub ({' '.join(str(error).split())[:200]})",
            expected="a DFlash drafter",
            remedy="Check the path or id.",
        ) from error


def read_shape(folder: Path, num_target_layers: int | None = None) -> DrafterShape:
    """The shape of a checkpoint. Raises UserError when it is not a DFlash drafter."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        return shape_from(config, str(path), num_target_layers)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
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
    num_target_layers: int | None = None,
) -> DFlash:
    """A drafter without embedding and head: call share() next. `round_to` bfloat16 gives the values
    an export holds. `num_target_layers` is needed for speculators' layout, which does not say it.
    """
    with torch.device("meta"):
        drafter = DFlash(read_shape(folder, num_target_layers))
    tensors = _read_tensors(folder)
    check_tensors({name: tuple(t.shape) for name, t in tensors.items()}, drafter, str(folder))
    own = {  # a copy: what is read is the file itself, which may change
        name: t.to(round_to or t.dtype).to(device, dtype, copy=True) for name, t in tensors.items()
    }
    drafter.load_state_dict(own, assign=True)
    return drafter.eval().requires_grad_(False)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                where=str(path),
                found=f"a file that does not load ({error})",
                expected="the drafter's weights",
                remedy="Check the path or train again.",
            ) from error
    return {name: tensors[name] for name in drafters_own(tensors)}


def check_tensors(found: dict[str, tuple[int, ...]], drafter: DFlash, where: str) -> None:
    """Every name and shape, none missing and none more: SGLang skips unknown tensors without a word."""
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    if wanted != found:
        wrong = sorted(set(wanted.items()) ^ set(found.items()))[:4]
        raise UserError(
            where=where,
            found=f"{len(found)} tensors, among them {wrong}",
            expected=f"the {len(wanted)} of z-lab's layout",
            remedy="Use an unmodified checkpoint.",
        )
