"""safetensors files written from pieces and read by byte ranges.

The library's own writer wants whole tensors in one buffer and its reader wants a local file; the
format itself is a JSON header and the tensors' bytes. The header's metadata names the SHA-256 of all
that follows it, so the header's own digest stands for the whole file, and a CRC-32 of each tensor, so that
one read alone is checked too.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core import Damaged
from draftsmith.places import Place

DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
REMEDY = "Delete it and run `draftsmith extract CONFIG` again."


@dataclass(frozen=True)
class Field:
    """A tensor to be written; `pieces` are its bytes in order."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    pieces: list[memoryview]


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in a file: bytes begin:end."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself. `num_bytes` is the whole file's size, `digest` the header's
    SHA-256.
    """

    spans: dict[str, Span]
    about: dict[str, str]
    header_bytes: int
    num_bytes: int
    digest: str


def raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes, not copied when it is contiguous."""
    words = tensor.contiguous().view(WORDS[tensor.itemsize])  # numpy knows no bf16
    return words.numpy().reshape(-1).view(np.uint8).data


def field(name: str, tensor: Tensor) -> Field:
    """A whole tensor."""
    return Field(name, tensor.dtype, list(tensor.shape), [raw(tensor)])


def pack(fields: Sequence[Field], about: dict[str, str]) -> list[memoryview]:
    """A file's bytes in pieces: the header, then the tensors, the widest items first (so that each is
    aligned) and among these the given order.
    """
    ordered = sorted(fields, key=lambda f: -f.dtype.itemsize)
    entries: dict[str, Any] = {}
    end = 0
    for one in ordered:
        begin, end = end, end + sum(map(len, one.pieces))
        assert end - begin == prod(one.shape) * one.dtype.itemsize, f"{one.name}: wrong size"
        entries[one.name] = {
            "dtype": NAMES[one.dtype],
            "shape": one.shape,
            "data_offsets": [begin, end],
        }
    with ThreadPoolExecutor(2, "checksum") as threads:
        whole = threads.submit(_sha256, ordered)
        crc32 = {one.name: threads.submit(_crc32, one.pieces) for one in ordered}
    sums = {name: job.result() for name, job in crc32.items()}
    about = {**about, "data_sha256": whole.result(), "crc32": json.dumps(sums)}
    text = json.dumps({"__metadata__": about, **entries}).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return [memoryview(head), *(piece for one in ordered for piece in one.pieces)]


def _sha256(fields: Sequence[Field]) -> str:
    """Of all their bytes, in order."""
    checksum = hashlib.sha256()
    for one in fields:
        for piece in one.pieces:
            checksum.update(piece)
    return checksum.hexdigest()


def _crc32(pieces: Sequence[memoryview]) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def read_header(place: Place, name: str) -> Header:
    """The file's header. Raises Damaged for a file that is no whole safetensors file."""
    where = place.where(name)
    (start,) = place.read_ranges(name, [(0, 8)])
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise damaged(where, f"a header of {length} bytes")
    (text,) = place.read_ranges(name, [(8, 8 + length)])
    return parse_header(bytes(start) + bytes(text), where)


def parse_header(head: bytes, where: str) -> Header:
    """The header from its bytes, its length's 8 included."""
    try:
        entries = json.loads(head[8:])
        about = entries.pop("__metadata__", {})
        spans = {
            key: Span(
                DTYPES[entry["dtype"]],
                entry["shape"],
                len(head) + entry["data_offsets"][0],
                len(head) + entry["data_offsets"][1],
            )
            for key, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged(where, f"no safetensors header ({error})") from None
    num_bytes = max((span.end for span in spans.values()), default=len(head))
    return Header(spans, about, len(head), num_bytes, hashlib.sha256(head).hexdigest())


def read_tensors(place: Place, name: str, header: Header, names: list[str]) -> dict[str, Tensor]:
    """Whole tensors of a file. Raises Damaged for bytes that are not those that were written."""
    spans = [header.spans[one] for one in names]
    pieces = place.read_ranges(name, [(span.begin, span.end) for span in spans])
    crc32 = json.loads(header.about.get("crc32", "{}"))
    for one, piece in zip(names, pieces, strict=True):
        if zlib.crc32(piece) != crc32.get(one):
            raise damaged(place.where(name), f"{one}: the checksum differs")
    return {
        one: tensor_of(piece, span) for one, span, piece in zip(names, spans, pieces, strict=True)
    }


def tensor_of(data: bytearray, span: Span) -> Tensor:
    """The tensor whose bytes these are."""
    if not data:
        return torch.empty(span.shape, dtype=span.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(span.dtype).reshape(span.shape)


def damaged(where: str, found: str) -> Damaged:
    """A shard that is not as it was written."""
    return Damaged(
        where=where,
        found=f"a damaged or missing shard ({found})",
        expected="a whole safetensors file",
        remedy=REMEDY,
    )
