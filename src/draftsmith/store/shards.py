"""Shards: ragged samples in one safetensors file each. Format: docs/formats.md.

Tensors (N tokens, S samples): hidden [N, taps, H], input_ids [N] int32, loss_mask [N] uint8,
offsets [S+1] int64, sample_ids [S] int64, and final [N, H] or argmax [N] int32 when asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith import manifest as manifests
from draftsmith.core import Sample, UserError
from draftsmith.files import file_digest, write_atomic

KIND = "features/1"


@dataclass(frozen=True)
class SampleFeatures:
    """One sample's states: hidden [n, taps, H], and final [n, H] or argmax [n] when asked for."""

    sample: Sample
    hidden: Tensor
    extra: dict[str, Tensor]


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:06d}.safetensors"


def write_shard(path: Path, samples: list[SampleFeatures]) -> None:
    """Write one shard aside and rename it."""
    lengths = torch.tensor([0] + [len(s.sample.input_ids) for s in samples])
    tensors = {
        "hidden": torch.cat([s.hidden for s in samples]),
        "input_ids": torch.tensor(
            [i for s in samples for i in s.sample.input_ids], dtype=torch.int32
        ),
        "loss_mask": torch.tensor(
            [i for s in samples for i in s.sample.loss_mask], dtype=torch.uint8
        ),
        "offsets": lengths.cumsum(0),
        "sample_ids": torch.tensor([s.sample.sample_id for s in samples]),
        **{name: torch.cat([s.extra[name] for s in samples]) for name in samples[0].extra},
    }
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"kind": KIND}))


def open_shard(path: Path) -> Any:
    """The shard's tensors, read lazily. Raises UserError for a file that is no whole shard."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            where=str(path),
            found=f"a damaged or missing shard ({error})",
            expected="a whole safetensors file",
            remedy="Delete it and run `draftsmith extract CONFIG` again.",
        ) from None


def shard_entry(path: Path) -> dict[str, Any]:
    """The manifest entry of a shard that exists."""
    with open_shard(path) as file:
        num_samples = file.get_slice("sample_ids").get_shape()[0]
        num_tokens = file.get_slice("input_ids").get_shape()[0]
    return {
        "sha256": file_digest(path),
        "bytes": path.stat().st_size,
        "samples": num_samples,
        "tokens": num_tokens,
    }


class StoreReader:
    """Random access to the samples of a complete store."""

    def __init__(self, folder: Path) -> None:
        manifest = manifests.read(folder)
        if manifest is None or manifest["kind"] != KIND or not manifest["complete"]:
            raise UserError(
                where=str(folder),
                found=f"a store of format {manifest['kind']}" if manifest else "no store",
                expected=f"a complete one of {KIND}, such as RUN/features",
                remedy="Give the store's folder, use a matching version of draftsmith, or extract again.",
            )
        self._files = {name: open_shard(folder / name) for name in sorted(manifest["files"])}
        self._where: dict[int, tuple[str, int, int]] = {}
        for name, file in self._files.items():
            offsets = file.get_tensor("offsets").tolist()
            for i, sample_id in enumerate(file.get_tensor("sample_ids").tolist()):
                self._where[sample_id] = (name, offsets[i], offsets[i + 1])

    @property
    def sample_ids(self) -> list[int]:
        """Every sample in the store."""
        return list(self._where)

    def length(self, sample_id: int) -> int:
        """Tokens of a sample."""
        _, start, end = self._where[sample_id]
        return end - start

    def read(
        self, sample_id: int, names: tuple[str, ...] = ("hidden", "input_ids", "loss_mask")
    ) -> dict[str, Tensor]:
        """The sample's rows of these tensors."""
        file_name, start, end = self._where[sample_id]
        return {name: self._files[file_name].get_slice(name)[start:end] for name in names}
