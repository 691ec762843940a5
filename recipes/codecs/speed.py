"""Size and speed of each codec on real states: python recipes/codecs/speed.py SHARD [MB]

SHARD: of a store with codec none. Megabytes of states a second of CPU time of one thread, so that a
busy machine does not change them; the best of three.
"""

import sys
import time
from pathlib import Path

import torch

from draftsmith import places
from draftsmith.bench.store import _real
from draftsmith.config import Codec
from draftsmith.store import shards
from draftsmith.store.codec import STATES, decode, encode
from draftsmith.store.container import Span, tensor_of


def main() -> None:
    path, limit = Path(sys.argv[1]), float(sys.argv[2] if len(sys.argv) > 2 else 200) * 1e6
    torch.set_num_threads(1)
    samples, total = [], 0
    for states in _real(path):
        if total + states.nbytes > limit:
            break
        samples.append(states.clone())
        total += states.nbytes
    header = shards.open_shard(places.at(path.parent), path.name).header
    print(f"{header.about['target']}, taps {header.about['taps']}, {total / 1e6:.0f} MB")
    for codec in STATES:
        measure(codec, samples, total)


def measure(codec: Codec, samples: list[torch.Tensor], total: int) -> None:
    """One line."""
    packing = unpacking = float("inf")
    size = 0
    for _ in range(3):
        start = time.process_time()
        packed = [encode(codec, [states]) for states in samples]
        packing = min(packing, time.process_time() - start)
        size, unpack = 0, 0.0
        for states, one in zip(samples, packed, strict=True):
            data = memoryview(bytearray(b"".join(one.fields[0].pieces)))
            small = {
                field.name: tensor_of(
                    bytearray(b"".join(field.pieces)), Span(field.dtype, field.shape, 0, 0)
                )
                for field in one.fields[1:]
            }
            size += len(data) + sum(tensor.nbytes for tensor in small.values())
            out = torch.empty_like(states)
            start = time.process_time()
            decode(codec, data, small, out)
            unpack += time.process_time() - start
        unpacking = min(unpacking, unpack)
    print(
        f"{codec:9s} {size / total:6.1%}  packs {total / packing / 1e6:5.0f} MB/s, "
        f"unpacks {total / unpacking / 1e6:5.0f} MB/s"
    )


if __name__ == "__main__":
    main()
