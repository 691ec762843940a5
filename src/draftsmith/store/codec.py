"""How states lie in a shard: as they are, losslessly packed, or in 8 bits (docs/formats.md).

A codec turns samples' states [n, taps, H] into fields of a shard and one sample's bytes back into
states, so that a sample stays one range read. `crc32` is of each sample's stored bytes of each tap.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from torch import Tensor

from draftsmith.config import Codec
from draftsmith.store.container import Field, field, raw

STATES: dict[Codec, str] = {"none": "hidden", "lossless": "hidden_zstd", "fp8": "hidden_fp8"}
"""The field that holds the states' bytes."""
ZSTD_LEVEL = 1  # higher levels cost several times the time for about 1% of the bytes
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
THREADS = 4  # samples of a shard at once: the last shard of a run is waited for


@dataclass(frozen=True)
class Encoded:
    """Samples' states as fields; sample i's bytes are ends[i - 1]:ends[i] of the first one."""

    fields: list[Field]
    crc32: Tensor
    ends: list[int]


def encode(codec: Codec, samples: list[Tensor]) -> Encoded:
    """The fields of these samples' states, each [n, taps, H] of one dtype."""
    one = {"none": _plain, "fp8": _eight_bits, "lossless": _compressed}[codec]
    with ThreadPoolExecutor(THREADS, "codec") as threads:
        done = list(threads.map(one, samples))
    pieces, ends = [piece for each in done for piece in each[0]], _ends([each[0] for each in done])
    crc32 = torch.tensor([each[1] for each in done])
    (taps, width), rows = samples[0].shape[1:], sum(map(len, samples))
    if codec == "lossless":
        frames = torch.tensor([0, *np.cumsum([len(piece) for piece in pieces]).tolist()])
        whole = Field("hidden_zstd", torch.uint8, [int(frames[-1])], pieces)
        return Encoded([whole, field("frames", frames)], crc32, ends)
    if codec == "fp8":
        whole = Field("hidden_fp8", FP8, [rows, taps, width], pieces)
        scale = torch.cat([each[2] for each in done if each[2] is not None])
        return Encoded([whole, field("hidden_scale", scale)], crc32, ends)
    return Encoded([Field("hidden", samples[0].dtype, [rows, taps, width], pieces)], crc32, ends)


def decode(codec: Codec, data: memoryview, small: dict[str, Tensor], out: Tensor) -> None:
    """Fill `out` [n, taps, H] from a sample's bytes and its part of the small fields (`frames`, from
    the sample's own start; `hidden_scale`). Raises ValueError for bytes that no encoder wrote.
    """
    if codec == "none":
        assert out.is_contiguous(), "a view would be filled, not the states"
        raw(out)[:] = data
    elif codec == "fp8":
        codes = torch.from_numpy(np.frombuffer(data, np.uint8)).view(FP8).reshape(out.shape)
        out.copy_(codes.float() * small["hidden_scale"][:, :, None])
    else:
        frames = small["frames"].tolist()
        for tap, (begin, end) in enumerate(zip(frames, frames[1:], strict=False)):
            out[:, tap] = _unpack(data[begin:end], out[:, tap])


def stored_crc32(
    codec: Codec, data: memoryview, small: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype
) -> list[int]:
    """CRC-32 of a sample's stored bytes, a tap each."""
    taps = shape[1]
    if codec == "lossless":
        frames = small["frames"].tolist()
        return [zlib.crc32(data[a:b]) for a, b in zip(frames, frames[1:], strict=False)]
    item = FP8 if codec == "fp8" else dtype
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], taps, shape[2] * item.itemsize)
    out = [zlib.crc32(np.ascontiguousarray(rows[:, tap]).data) for tap in range(taps)]
    if codec == "fp8":
        scale = small["hidden_scale"]
        return [zlib.crc32(raw(scale[:, tap]), crc) for tap, crc in enumerate(out)]
    return out


def _ends(samples: list[list[memoryview]]) -> list[int]:
    return np.cumsum([sum(map(len, pieces)) for pieces in samples]).tolist()


One = tuple[list[memoryview], list[int], Tensor | None]
"""A sample's bytes in pieces, the CRC-32 of each tap's, and what else a codec keeps of it."""


def _plain(states: Tensor) -> One:
    return [raw(states)], [zlib.crc32(raw(states[:, t])) for t in range(states.shape[1])], None


def _eight_bits(states: Tensor) -> One:
    """e4m3 with a scale for each token and tap: the row's largest magnitude becomes 448."""
    wide = states.float()
    peak = wide.abs().amax(-1) if len(wide) else wide.new_zeros(0, states.shape[1])
    assert torch.isfinite(peak).all(), "8 bits hold finite states only"
    scale = (peak / FP8_MAX).clamp_min(SMALLEST_SCALE)
    code = (wide / scale[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    crc = [
        zlib.crc32(raw(scale[:, t]), zlib.crc32(raw(code[:, t]))) for t in range(states.shape[1])
    ]
    return [raw(code)], crc, scale


def _compressed(states: Tensor) -> One:
    """A zstd frame for each tap; a shard's `frames` [S * taps + 1] are their byte offsets."""
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
    taps = [packer.compress(_planes(states[:, tap])) for tap in range(states.shape[1])]
    return [memoryview(frame) for frame in taps], [zlib.crc32(frame) for frame in taps], None


def _planes(rows: Tensor) -> bytes:
    """Byte k of every item beside each other, the highest (sign and exponent) first."""
    items = np.frombuffer(raw(rows), np.uint16 if rows.itemsize == 2 else np.uint32)
    shifts = range(8 * rows.itemsize - 8, -1, -8)
    planes = [(items >> np.array(shift, items.dtype)).astype(np.uint8) for shift in shifts]
    return b"".join(plane.data for plane in planes)


def _unpack(frame: memoryview, like: Tensor) -> Tensor:
    """The rows of one frame, of `like`'s shape and dtype."""
    size = like.numel() * like.itemsize
    try:
        holds = zstandard.frame_content_size(frame)
        if holds != size:  # looked at first: a broken size must not be allocated
            raise ValueError(f"a frame of {holds} bytes, not {size}")
        data = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"a broken zstd frame ({error})") from None
    planes = np.frombuffer(data, np.uint8).reshape(like.itemsize, like.numel())
    kind = np.uint16 if like.itemsize == 2 else np.uint32
    items = np.zeros(like.numel(), kind)
    for plane in planes:
        items <<= np.array(8, kind)
        items |= plane
    return torch.from_numpy(items.view(np.uint8)).view(like.dtype).reshape(like.shape)
