"""Random access to the samples of a complete store, local or on S3: one range read a sample."""

import threading
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.core import UserError
from draftsmith.places import Place
from draftsmith.store import index
from draftsmith.store.codec import decode, stored_crc32
from draftsmith.store.container import damaged, raw, tensor_of
from draftsmith.store.shards import KIND, Shard, open_shard, shard_name

NAMES = ("hidden", "input_ids", "loss_mask")


class StoreReader:
    """Samples by id; several threads may read. The bytes of a sample are held against their checksums when
    they are read first.
    """

    def __init__(self, location: Path | str | Place) -> None:
        self.place = places.at(location)
        self.manifest = complete_manifest(self.place)
        self.dtype: torch.dtype = getattr(torch, self.manifest["inputs"]["dtype"])
        self.codec = self.manifest["inputs"]["codec"]
        self._taps: list[int] = self.manifest["inputs"]["taps"]
        self._where = index.read(self.place, self.manifest["files"][index.NAME])
        self._shards: dict[int, Shard] = {}
        self._checked: set[int] = set()
        self._opening = threading.Lock()

    @property
    def sample_ids(self) -> list[int]:
        """Every sample in the store."""
        return list(self._where)

    def length(self, sample_id: int) -> int:
        """Tokens of a sample."""
        return self._where[sample_id].tokens

    def shard(self, sample_id: int) -> Shard:
        """The sample's shard, opened once."""
        number = self._where[sample_id].shard
        with self._opening:
            if number not in self._shards:
                name = shard_name(number)
                self._shards[number] = open_shard(self.place, name, self.manifest["files"][name])
            return self._shards[number]

    @property
    def states_shape(self) -> tuple[int, int]:
        """Taps and hidden size."""
        inputs = self.manifest["inputs"]
        return len(inputs["taps"]), inputs["target"]["hidden_size"]

    def read(self, sample_id: int, names: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
        """The sample's rows of these tensors."""
        return {name: self._rows(sample_id, name) for name in names}

    def _rows(self, sample_id: int, name: str) -> Tensor:
        where, shard = self._where[sample_id], self.shard(sample_id)
        if name == "hidden":
            shape = (where.tokens, *self.states_shape)
            return self.states_into(sample_id, torch.empty(shape, dtype=self.dtype))
        first, last = shard.rows(where.place)
        if name in shard.small:
            return shard.small[name][first:last]
        span = shard.header.spans[name]
        (data,) = self.place.read_ranges(shard.name, [shard.row_span(where.place, name)])
        if zlib.crc32(data) != int(shard.small[f"{name}_crc32"][where.place]):
            said = f"sample {sample_id}, {name}: the checksum differs"
            raise damaged(self.place.where(shard.name), said)
        return tensor_of(data, replace(span, shape=[last - first, *span.shape[1:]]))

    def states_into(self, sample_id: int, out: Tensor) -> Tensor:
        """Read the sample's states into `out` [n, taps, H], contiguous; `out`. Raises Damaged, with sample
        and tap, for bytes that are not those that were written.
        """
        assert out.is_contiguous(), "a copy would be filled"
        where = self._where[sample_id]
        if self.codec == "none":  # straight into the batch
            self.place.read_into(shard_name(where.shard), where.begin, raw(out))
            self._check(sample_id, raw(out), out.shape)
            return out
        shard = self.shard(sample_id)
        (data,) = self.place.read_ranges(shard.name, [(where.begin, where.end)])
        self._check(sample_id, memoryview(data), out.shape)
        try:
            decode(self.codec, memoryview(data), shard.of_sample(where.place), out)
        except ValueError as error:
            raise damaged(self.place.where(shard.name), f"sample {sample_id}: {error}") from None
        return out

    def _check(self, sample_id: int, data: memoryview, shape: torch.Size) -> None:
        if sample_id in self._checked:
            return
        shard, place = self.shard(sample_id), self._where[sample_id].place
        now = stored_crc32(self.codec, data, shard.of_sample(place), shape, self.dtype)
        then = shard.small["crc32"][place].tolist()
        if wrong := [tap for tap, a, b in zip(self._taps, now, then, strict=True) if a != b]:
            said = f"sample {sample_id}, tap {', '.join(map(str, wrong))}: the checksum differs"
            raise damaged(self.place.where(shard.name), said)
        self._checked.add(sample_id)


def is_complete(place: Place) -> bool:
    """Whether a finished store of this format is there."""
    manifest = manifests.read(place)
    return manifest is not None and manifest["kind"] == KIND and manifest["complete"]


def complete_manifest(place: Place) -> dict:
    """The manifest of a complete store of this format, or a UserError."""
    manifest = manifests.read(place)
    if manifest is None or manifest["kind"] != KIND or not manifest["complete"]:
        found = "no store"
        if manifest is not None:
            done = "a complete" if manifest["complete"] else "an unfinished"
            found = f"{done} store of format {manifest['kind']}"
        raise UserError(
            where=str(place),
            found=found,
            expected=f"a complete one of {KIND}",
            remedy="Use a matching version of draftsmith, or extract again.",
        )
    return manifest
