"""Shards: ragged samples in one safetensors file each. Format: docs/formats.md.

Tensors (N tokens, S samples): the states (codec.py: hidden [N, taps, H], or what a codec makes of
them), input_ids [N] int32, loss_mask [N] uint8, offsets [S+1] int64, sample_ids [S] int64, crc32
[S, taps] int64, and final [N, H] or argmax [N] int32 when asked for.
"""

import bisect
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.config import Codec
from draftsmith.core import Sample
from draftsmith.files import digest
from draftsmith.places import Place
from draftsmith.store.codec import STATES, encode
from draftsmith.store.container import (
    Field,
    Header,
    damaged,
    field,
    pack,
    raw,
    read_header,
    read_tensors,
)

KIND = "features/3"
LARGE = (*STATES.values(), "final")
"""Fields of states; the others are small and read once a shard."""


@dataclass(frozen=True)
class SampleFeatures:
    """One sample's states: hidden [n, taps, H], and final [n, H] or argmax [n] when asked for."""

    sample: Sample
    hidden: Tensor
    extra: dict[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """An opened shard: where its tensors lie, and the small ones themselves."""

    name: str
    header: Header
    small: dict[str, Tensor]
    codec: Codec

    @property
    def states(self) -> str:
        """The name of the field that holds the states."""
        return STATES[self.codec]

    def rows(self, i: int) -> tuple[int, int]:
        """The first row of the shard's i-th sample, and the one after its last."""
        return int(self.small["offsets"][i]), int(self.small["offsets"][i + 1])

    def span(self, i: int) -> tuple[int, int]:
        """The file's bytes begin:end that hold the i-th sample's states."""
        states = self.header.spans[self.states]
        if self.codec == "lossless":
            taps = self.small["crc32"].shape[1]
            begin, end = (int(self.small["frames"][k * taps]) for k in (i, i + 1))
            return states.begin + begin, states.begin + end
        return self.row_span(i, self.states)

    def row_span(self, i: int, name: str) -> tuple[int, int]:
        """The file's bytes of the i-th sample's rows of a tensor."""
        span, (first, last) = self.header.spans[name], self.rows(i)
        row = (span.end - span.begin) // max(1, span.shape[0])
        return span.begin + first * row, span.begin + last * row

    def of_sample(self, i: int) -> dict[str, Tensor]:
        """The i-th sample's part of the small fields that its codec needs."""
        if self.codec == "lossless":
            taps = self.small["crc32"].shape[1]
            frames = self.small["frames"][i * taps : (i + 1) * taps + 1]
            return {"frames": frames - frames[0]}
        first, last = self.rows(i)
        scale = self.small.get("hidden_scale")
        return {} if scale is None else {"hidden_scale": scale[first:last]}


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:06d}.safetensors"


def shard_number(name: str) -> int:
    """The index in a shard's file name."""
    return int(name.removeprefix("shard-").removesuffix(".safetensors"))


def about(inputs: dict[str, Any]) -> dict[str, str]:
    """What a shard's header says of the store it belongs to."""
    said = {key: inputs[key] for key in ("target", "taps", "dtype", "codec", "final")}
    return {"kind": KIND, "inputs": digest(inputs), **{k: json.dumps(v) for k, v in said.items()}}


def write_shard(
    place: Place,
    name: str,
    samples: list[SampleFeatures],
    codec: Codec,
    said: dict[str, str],
    room: int | None = None,
) -> tuple[int, int]:
    """Write one shard of all samples, or of the first ones that fit into `room` bytes with their part
    of the index; it appears whole, or another writer's does. The samples written, and the room taken;
    nothing is written when none fits.
    """
    count, parts = len(samples), pack(_fields(samples, codec), said)
    if room is not None and _takes(parts, count) > room:

        def taken_by(first: int) -> int:
            return _takes(pack(_fields(samples[:first], codec), said), first)

        count = bisect.bisect_right(
            range(1, count), room, key=taken_by
        )  # packed anew: once a store
        parts = pack(_fields(samples[:count], codec), said) if count else []
    if count:
        place.put_new(name, parts)
    return count, _takes(parts, count)


INDEX_ROW_BYTES, ENTRY_BYTES = 48, 320
"""What a sample takes in the index, and a shard in the manifest."""


def room_taken(size: int, count: int) -> int:
    """What a shard of `size` bytes and `count` samples takes of a store's budget."""
    return size + count * INDEX_ROW_BYTES + ENTRY_BYTES


def _takes(parts: Sequence[memoryview], count: int) -> int:
    return room_taken(sum(map(len, parts)), count)


def _fields(samples: list[SampleFeatures], codec: Codec) -> list[Field]:
    states = encode(codec, [s.hidden for s in samples])
    lengths = torch.tensor([0] + [len(s.sample.input_ids) for s in samples])
    ids = [i for s in samples for i in s.sample.input_ids]
    masks = [i for s in samples for i in s.sample.loss_mask]
    small = [
        field("offsets", lengths.cumsum(0)),
        field("sample_ids", torch.tensor([s.sample.sample_id for s in samples])),
        field("crc32", states.crc32),
        field("input_ids", torch.tensor(ids, dtype=torch.int32)),
        field("loss_mask", torch.tensor(masks, dtype=torch.uint8)),
    ]
    return [*small, *states.fields[1:], *_extra_fields(samples), states.fields[0]]


def _extra_fields(samples: list[SampleFeatures]) -> list[Field]:
    out = []
    for name, first in samples[0].extra.items():
        pieces = [raw(s.extra[name]) for s in samples]
        if name in LARGE:  # read a sample at a time
            crc32 = torch.tensor([zlib.crc32(piece) for piece in pieces])
            out.append(field(f"{name}_crc32", crc32))
        rows = sum(len(s.extra[name]) for s in samples)
        out.append(Field(name, first.dtype, [rows, *first.shape[1:]], pieces))
    return out


def open_shard(place: Place, name: str, entry: dict[str, Any] | None = None) -> Shard:
    """The shard's header and small tensors. Raises Damaged for a file that is no whole shard, or not
    the one of its manifest `entry`.
    """
    header = read_header(place, name)
    if entry is not None and header.digest != entry["sha256"]:
        raise damaged(place.where(name), "another shard than the manifest names")
    return shard_of(name, header, read_tensors(place, name, header, small_names(header)))


def small_names(header: Header) -> list[str]:
    """The tensors that are read once a shard."""
    return [one for one in header.spans if one not in LARGE]


def shard_of(name: str, header: Header, small: dict[str, Tensor]) -> Shard:
    """The opened shard of these parts."""
    codec: Any = next((c for c, states in STATES.items() if states in header.spans), None)
    if codec is None or header.about.get("kind") != KIND:
        raise damaged(name, f"a file of format {header.about.get('kind')}, not {KIND}")
    return Shard(name, header, small, codec)


def shard_entry(
    place: Place, name: str, size: int, said: dict[str, str]
) -> tuple[dict[str, Any], Shard]:
    """The manifest entry of a shard of `size` bytes, and the shard. Its `sha256` is the header's,
    which holds the data's. Raises Damaged for one that is cut short or belongs to other inputs.
    """
    shard = open_shard(place, name)
    if size != shard.header.num_bytes:
        raise damaged(place.where(name), f"{size} bytes, not {shard.header.num_bytes}")
    if any(shard.header.about.get(key) != value for key, value in said.items()):
        raise damaged(place.where(name), "a shard made for other inputs")
    entry = {
        "sha256": shard.header.digest,
        "bytes": size,
        "samples": len(shard.small["sample_ids"]),
        "tokens": len(shard.small["input_ids"]),
    }
    return entry, shard
