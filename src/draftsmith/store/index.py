"""index.safetensors: for each sample of a store its shard, its place and length there, and the bytes
that hold its states, so that any sample is one range read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.places import Place
from draftsmith.store.container import damaged, field, pack, parse_header, read_header, read_tensors
from draftsmith.store.shards import Shard, shard_entry

NAME = "index.safetensors"
KIND = "features-index/3"
COLUMNS = ("sample_ids", "shard", "place", "tokens", "begin", "end")


@dataclass(frozen=True)
class Where:
    """A sample's place: the `place`-th of its shard, its states in the file's bytes begin:end."""

    shard: int
    place: int
    tokens: int
    begin: int
    end: int


def rows_of(number: int, shard: Shard) -> Tensor:
    """[S, columns] of shard `number`."""
    count = len(shard.small["sample_ids"])
    spans = torch.tensor([shard.span(i) for i in range(count)]).reshape(count, 2)
    numbers, places = torch.full((count,), number), torch.arange(count)
    tokens = shard.small["offsets"].diff()
    return torch.stack([shard.small["sample_ids"], numbers, places, tokens, *spans.T], dim=1)


def write(place: Place, rows: list[Tensor]) -> dict[str, Any]:
    """Write the index of these shards' rows; its manifest entry."""
    table = torch.cat(rows)
    fields = [field(name, table[:, i].contiguous()) for i, name in enumerate(COLUMNS)]
    parts = pack(fields, {"kind": KIND})
    place.replace(NAME, b"".join(parts))
    header = parse_header(bytes(parts[0]), place.where(NAME))
    return {"sha256": header.digest, "bytes": header.num_bytes, "samples": len(table)}


def entries(place: Place, names: list[str], said: dict[str, str]) -> dict[str, Any]:
    """The manifest's entries of all shards of a store and of its index, which is written here."""
    out, rows, sizes = {}, [], place.sizes(names)
    for number, name in enumerate(names):
        out[name], shard = shard_entry(place, name, sizes.get(name, 0), said)
        rows.append(rows_of(number, shard))
    return {**out, NAME: write(place, rows)}


def read(place: Place, entry: dict[str, Any]) -> dict[int, Where]:
    """Where every sample is. Raises Damaged when it is not the manifest's index."""
    header = read_header(place, NAME)
    if header.digest != entry["sha256"] or header.about.get("kind") != KIND:
        raise damaged(place.where(NAME), "another index than the manifest names")
    columns = read_tensors(place, NAME, header, list(COLUMNS))
    lists = [columns[name].tolist() for name in COLUMNS]
    return {sample_id: Where(*rest) for sample_id, *rest in zip(*lists, strict=True)}
