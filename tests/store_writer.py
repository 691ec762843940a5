"""A process that writes a store, for tests with several: WHERE WRITER. Both writers of a store have the
same samples and inputs, but other states, so that it shows whose shard is whose.
"""

import random
import sys
import time
from typing import Any

import torch

from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.core import Sample
from draftsmith.store import index, shards
from draftsmith.store.shards import KIND, SampleFeatures, shard_name, write_shard
from stores import HIDDEN, TAPS, inputs

SHARDS, PER_SHARD, TOKENS = 12, 3, 300


def sample(number: int, writer: int) -> SampleFeatures:
    """Sample `number` as this writer has it."""
    generator = torch.Generator().manual_seed(1000 * writer + number)
    states = torch.randn(TOKENS, TAPS, HIDDEN, generator=generator).bfloat16()
    return SampleFeatures(Sample(number, list(range(TOKENS)), [1] * TOKENS), states, {})


def write(location: Any, writer: int, *, pause: float = 0.0) -> None:
    """Write what is missing of the store, as extraction does; the second writer from the end, so that
    each shard is written twice and both are first at some.
    """
    place = places.at(location)
    manifest = manifests.begin(place, KIND, inputs(), remake=False)
    if manifest["complete"]:
        return
    said = shards.about(manifest["inputs"])
    names = [shard_name(n) for n in range(SHARDS)]
    order, rng = list(range(SHARDS))[:: 1 if writer == 1 else -1], random.Random(writer)
    there = place.sizes(names)
    for n in order:
        if names[n] not in there:
            made = [sample(PER_SHARD * n + k, writer) for k in range(PER_SHARD)]
            time.sleep(pause * rng.random())
            write_shard(place, names[n], made, "none", said)
    counts = {"samples": SHARDS * PER_SHARD, "shards": SHARDS, "tokens": 0}
    manifests.finish(place, manifest, index.entries(place, names, said), counts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ready", flush=True)
    sys.stdin.readline()  # both begin at once
    write(sys.argv[1], int(sys.argv[2]), pause=0.05)
