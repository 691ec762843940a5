"""Feature stores of given states, written as the extract stage writes them."""

from typing import Any

import torch

from draftsmith import manifest as manifests
from draftsmith import places
from draftsmith.core import Sample
from draftsmith.store import index, shards
from draftsmith.store.shards import KIND, SampleFeatures, shard_name, write_shard

TAPS, HIDDEN = 3, 16


def inputs(**changes: Any) -> dict[str, Any]:
    """What a small store is made from."""
    said = {"target": {"model": "tiny", "hidden_size": HIDDEN, "num_layers": 6}, "taps": [1, 2, 4]}
    return {**said, "dtype": "bfloat16", "codec": "none", "final": "none", "seed": 0, **changes}


def features(lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> list[SampleFeatures]:
    """Random samples of these lengths; ids descend from 100."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [
        SampleFeatures(
            Sample(100 - n, list(range(length)), [i % 2 for i in range(length)]),
            torch.randn(length, TAPS, HIDDEN, generator=generator).to(dtype),
            {"argmax": torch.arange(length, dtype=torch.int32)},
        )
        for n, length in enumerate(lengths)
    ]


def write_store(
    location: Any, samples: list[SampleFeatures], made_from: dict[str, Any], per_shard: int = 3
) -> dict[str, Any]:
    """A complete store of these samples, `per_shard` in each shard; its manifest."""
    place = places.at(location)
    manifest = manifests.begin(place, KIND, made_from, remake=False)
    said = shards.about(manifest["inputs"])
    names = []
    for first in range(0, len(samples), per_shard):
        names.append(shard_name(len(names)))
        write_shard(place, names[-1], samples[first : first + per_shard], made_from["codec"], said)
    tokens = sum(len(s.sample.input_ids) for s in samples)
    counts = {"samples": len(samples), "tokens": tokens, "shards": len(names)}
    return manifests.finish(place, manifest, index.entries(place, names, said), counts)
