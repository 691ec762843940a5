"""What can be wrong with a store, looked for in its own bytes: damaged files, and states that no
target makes (zero, constant, NaN, infinite or repeated rows). recompute.py looks for the rest.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.core import Damaged
from draftsmith.files import digest
from draftsmith.manifest import differences
from draftsmith.places import Place
from draftsmith.store import index
from draftsmith.store.codec import decode, stored_crc32
from draftsmith.store.container import Header, parse_header, tensor_of
from draftsmith.store.shards import Shard, shard_of, small_names

PROBED = 16  # columns whose values tell rows apart before whole rows are compared


@dataclass(frozen=True)
class Finding:
    """A fault and where it is; None: not of one sample or tap."""

    finding: str
    shard: str | None = None
    sample: int | None = None
    tap: int | None = None

    def __str__(self) -> str:
        places = [("sample", self.sample), ("tap", self.tap)]
        named = [self.shard] if self.shard else []
        return ", ".join(named + [f"{k} {v}" for k, v in places if v is not None]) + (
            f": {self.finding}"
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


Tokens = dict[int, tuple[list[int], list[int]]]
"""input_ids and loss_mask of each sample, as the run's data has them."""


@dataclass
class StoreChecks:
    """The checks of one store, a shard at a time. Gathers `seen` samples and their fingerprints."""

    place: Place
    manifest: dict[str, Any]
    tokens: Tokens | None = None
    seen: set[int] = field(default_factory=set)
    _prints: dict[tuple, tuple[int, list[int]]] = field(default_factory=dict)

    def run(self) -> Iterator[Finding]:
        """Every finding."""
        names = sorted(name for name in self.manifest["files"] if name != index.NAME)
        sizes = self.place.sizes(self.manifest["files"])
        for name in names:
            if name not in sizes:
                yield Finding("no such file", name)
                continue
            try:
                yield from self.shard(name, sizes[name])
            except Damaged as error:
                yield Finding(str(error), name)
        yield from self._index()
        if self.tokens is not None:
            yield from self._absent(self.tokens)

    def shard(self, name: str, size: int) -> Iterator[Finding]:
        """One shard, read whole and once."""
        entry = self.manifest["files"][name]
        data = bytearray(size)
        self.place.read_into(name, 0, memoryview(data))
        length = 8 + int.from_bytes(data[:8], "little")
        header = parse_header(bytes(data[:length]), self.place.where(name))
        if size < header.num_bytes:
            yield Finding(_cut(name, header, data), name)
            return
        yield from self._header(name, header, entry)
        if header.about.get("inputs") != digest(self.manifest["inputs"]):
            return
        shard = _opened(name, header, data)
        body = memoryview(data)[header.header_bytes :]
        if hashlib.sha256(body).hexdigest() != header.about["data_sha256"]:
            yield from self._changed(shard, data)
        for i, sample_id in enumerate(shard.small["sample_ids"].tolist()):
            self.seen.add(sample_id)
            yield from self._sample(shard, i, sample_id, data)

    def _header(self, name: str, header: Header, entry: dict[str, Any]) -> Iterator[Finding]:
        inputs = self.manifest["inputs"]
        if header.about.get("inputs") != digest(inputs):
            said = {k: json.loads(header.about.get(k, "null")) for k in ("target", "taps", "codec")}
            changes = "; ".join(differences({k: inputs[k] for k in said}, said))
            yield Finding(f"a shard of another store ({changes or 'other inputs'})", name)
        elif header.digest != entry["sha256"]:
            yield Finding("the header differs from the one the manifest names", name)

    def _changed(self, shard: Shard, data: bytearray) -> Iterator[Finding]:
        """Which samples' and taps' bytes changed."""
        found = False
        for i, sample_id in enumerate(shard.small["sample_ids"].tolist()):
            begin, end = shard.span(i)
            now = stored_crc32(
                shard.codec,
                memoryview(data)[begin:end],
                shard.of_sample(i),
                self._shape(shard, i),
                self._dtype(),
            )
            for tap, crc, then in zip(
                self.manifest["inputs"]["taps"], now, shard.small["crc32"][i].tolist(), strict=True
            ):
                if crc != then:
                    found = True
                    yield Finding("bytes changed: the checksum differs", shard.name, sample_id, tap)
        if not found:
            yield Finding("bytes beside the states changed: the checksum differs", shard.name)

    def _sample(self, shard: Shard, i: int, sample_id: int, data: bytearray) -> Iterator[Finding]:
        first, last = shard.rows(i)
        ids = shard.small["input_ids"][first:last]
        begin, end = shard.span(i)
        states = torch.empty(self._shape(shard, i), dtype=self._dtype())
        try:
            decode(shard.codec, memoryview(data)[begin:end], shard.of_sample(i), states)
        except ValueError as error:
            yield Finding(str(error), shard.name, sample_id)
            return
        for tap, text in faults(states, ids, self.manifest["inputs"]["taps"]):
            yield Finding(text, shard.name, sample_id, tap)
        key = (last - first, *shard.small["crc32"][i].tolist())
        twin, its = self._prints.setdefault(key, (sample_id, ids.tolist()))
        if its != ids.tolist():
            yield Finding(
                f"the states of sample {twin}, which has other tokens", shard.name, sample_id
            )
        if self.tokens is not None:
            yield from self._tokens(shard, sample_id, ids, shard.small["loss_mask"][first:last])

    def _tokens(self, shard: Shard, sample_id: int, ids: Tensor, mask: Tensor) -> Iterator[Finding]:
        assert self.tokens is not None, "asked for with tokens only"
        if sample_id not in self.tokens:
            yield Finding("a sample that the run's tokens lack", shard.name, sample_id)
        elif self.tokens[sample_id] != (ids.tolist(), mask.tolist()):
            yield Finding("other tokens than the run's data/tokens", shard.name, sample_id)

    def _absent(self, tokens: Tokens) -> Iterator[Finding]:
        absent = sorted(set(tokens) - self.seen)
        if len(absent) == self.manifest["counts"].get("left_out", 0):
            return  # for want of room, as the manifest says
        for sample_id in absent[:100]:
            yield Finding("no states of this sample", sample=sample_id)

    def _index(self) -> Iterator[Finding]:
        try:
            index.read(self.place, self.manifest["files"][index.NAME])
        except Damaged as error:
            yield Finding(str(error), index.NAME)

    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.manifest["inputs"]["dtype"])

    def _shape(self, shard: Shard, i: int) -> torch.Size:
        inputs = self.manifest["inputs"]
        first, last = shard.rows(i)
        return torch.Size((last - first, len(inputs["taps"]), inputs["target"]["hidden_size"]))


def _opened(name: str, header: Header, data: bytearray) -> Shard:
    small = {
        one: tensor_of(data[header.spans[one].begin : header.spans[one].end], header.spans[one])
        for one in small_names(header)
    }
    return shard_of(name, header, small)


def _cut(name: str, header: Header, data: bytearray) -> str:
    """What a file that was cut short lost, as far as its rest tells."""
    text = f"cut short: {len(data)} bytes, not {header.num_bytes}"
    if any(header.spans[one].end > len(data) for one in ("offsets", "sample_ids", "crc32")):
        return text
    kept = {
        one: tensor_of(data[header.spans[one].begin : header.spans[one].end], header.spans[one])
        for one in small_names(header)
        if header.spans[one].end <= len(data)
    }
    shard = shard_of(name, header, kept)
    for i, sample_id in enumerate(kept["sample_ids"].tolist()):
        if shard.span(i)[1] > len(data):
            return f"{text}; states are lost from sample {sample_id} on"
    return text


def faults(states: Tensor, ids: Tensor, taps: list[int]) -> Iterator[tuple[int, str]]:
    """(tap, fault) of one sample's states [n, taps, H] for its tokens [n]."""
    if not len(states):
        return
    low, high = (edge.float() for edge in torch.aminmax(states, dim=-1))
    for column, tap in enumerate(taps):
        one_low, one_high = low[:, column], high[:, column]
        broken = ~(torch.isfinite(one_low) & torch.isfinite(one_high))
        zero = (one_low == 0) & (one_high == 0)
        constant = (one_low == one_high) & ~zero
        for rows, what in ((broken, "NaN or infinite"), (zero, "zero"), (constant, "constant")):
            if rows.any():
                yield tap, f"{_count(rows)} {what}"
        if not (zero | constant | broken).any():
            twins = _twins(states[:, column], ids)
            if twins is not None:
                yield tap, f"rows {twins[0]} and {twins[1]} are the same, their tokens are not"


def _count(rows: Tensor) -> str:
    return f"{int(rows.sum())} of {len(rows)} rows (first: {int(rows.nonzero()[0])}) are"


def _twins(rows: Tensor, ids: Tensor) -> tuple[int, int] | None:
    """Two rows [n, H] that are bit for bit the same though their tokens differ. Equal tokens may have
    equal states: a run of one token attends to nothing but itself.
    """
    columns = torch.linspace(0, rows.shape[1] - 1, min(PROBED, rows.shape[1])).long()
    probe = rows[:, columns].contiguous().view(torch.uint8).reshape(len(rows), -1)
    _, group, sizes = probe.unique(dim=0, return_inverse=True, return_counts=True)
    for number in (sizes > 1).nonzero().flatten().tolist():
        members = (group == number).nonzero().flatten()
        for k in range(1, len(members)):
            a, b = int(members[0]), int(members[k])
            if ids[a] != ids[b] and torch.equal(rows[a], rows[b]):
                return a, b
    return None
