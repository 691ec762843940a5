"""What the fp8 codec costs in acceptance: the same drafter trained on stored states as they are and
on their 8-bit form, same seeds, then walked along held-out answers with the target's true states.

    python recipes/codecs/acceptance.py CONFIG SEEDS [--section.key VALUE ...]
    python recipes/codecs/acceptance.py recipes/smollm2.yaml 3

CONFIG's run must be extracted with codec none. Needs no target beyond its embedding and head; a
killed run goes on from its checkpoints. Prints the table and writes RUN/codecs/acceptance.json.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import draftsmith.tokenize as tokenize_stage
from draftsmith import cli, configfile, extract, files, places, train
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import Sample
from draftsmith.decode.methods import prompt_of
from draftsmith.decode.replay import replay
from draftsmith.drafter.model import DFlash
from draftsmith.features import StoreSource
from draftsmith.metrics import bootstrap_tau
from draftsmith.monitor.state import stage_report
from draftsmith.ranks import Ranks
from draftsmith.store import index, shards
from draftsmith.store.reader import StoreReader
from draftsmith.store.shards import KIND, SampleFeatures, shard_name, write_shard
from draftsmith.train.schedule import plan_steps
from draftsmith.train.sources import Opened, frozen_of

CODECS = ("none", "fp8")
PER_SHARD = 64


def main() -> None:
    path, seeds, *rest = sys.argv[1:]
    paths, overrides = cli._split(rest)
    assert not paths, "one CONFIG, a count of seeds, overrides"
    cfg = configfile.load(Path(path), overrides)
    extract.finished(cfg)
    tokens = tokenize_stage.finished(cfg)
    samples = tokenize_stage.read_samples(cfg, tokens)
    mine = [s for s in samples if s.split == "train"]
    held_out = [s for s in samples if s.split == "held_out"]
    stores = {"none": cfg.store, "fp8": str(cfg.root / "codecs" / "fp8")}
    in_8_bits(StoreReader(stores["none"]), stores["fp8"])
    frozen, _ = frozen_of(cfg)
    rounds: dict[str, list[np.ndarray]] = {codec: [] for codec in CODECS}
    for seed in range(int(seeds)):
        for codec in CODECS:
            drafter = trained(cfg, codec, stores[codec], mine, seed, frozen)
            rounds[codec].append(walked(drafter, StoreReader(stores["none"]), held_out))
    result = table(rounds, len(mine), len(held_out))
    files.write_json(cfg.root / "codecs" / "acceptance.json", result)
    for row in result["rows"]:
        print(row)


def in_8_bits(reader: StoreReader, location: str) -> None:
    """The same store with codec fp8, as `extract` would have written it."""
    place = places.at(location)
    inputs = {**reader.manifest["inputs"], "codec": "fp8"}
    manifest = manifests.begin(place, KIND, inputs, remake=False)
    if manifest["complete"]:
        return
    said, names, ids = shards.about(manifest["inputs"]), [], reader.sample_ids
    for first in range(0, len(ids), PER_SHARD):
        names.append(shard_name(len(names)))
        out = []
        for i in ids[first : first + PER_SHARD]:
            read = reader.read(i)
            sample = Sample(i, read["input_ids"].tolist(), read["loss_mask"].tolist())
            out.append(SampleFeatures(sample, read["hidden"], {}))
        write_shard(place, names[-1], out, "fp8", said)
    manifests.finish(place, manifest, index.entries(place, names, said), reader.manifest["counts"])


def trained(
    cfg: RunConfig, codec: str, store: str, samples: list[Sample], seed: int, frozen: Any
) -> DFlash:
    """A drafter trained on this store; the seed decides weights, batches and anchors alike."""
    settings = cfg.train.model_copy(update={"seed": seed})
    where = str(cfg.root / "codecs" / f"{codec}-{seed}")
    cfg = cfg.model_copy(update={"train": settings, "run": where})
    drafter = train.first_weights(cfg, train.drafter_shape(cfg)).share(*frozen)
    source = StoreSource(store, [sample.sample_id for sample in samples])
    masks = [np.array(sample.loss_mask) for sample in samples]
    num_anchors = [int((mask[:-1] & mask[1:]).sum()) for mask in masks]
    opened = Opened(source, num_anchors, source, [], frozen, None)
    steps = plan_steps(cfg.train, source.lengths, num_anchors, seed)
    with stage_report(cfg.root, "train") as report:
        train.train(cfg, drafter, opened, steps, report, Ranks())
    return drafter.eval()


def walked(drafter: DFlash, reader: StoreReader, held_out: list[Sample]) -> np.ndarray:
    """[prompts, 2]: tokens emitted and rounds along each held-out answer."""
    out = []
    for sample in held_out:
        hidden = reader.read(sample.sample_id, ("hidden",))["hidden"].float()
        emitted = replay(drafter, sample.input_ids, len(prompt_of(sample)), hidden).emitted
        out.append((sum(emitted), len(emitted)))
    return np.array(out)


def table(rounds: dict[str, list[np.ndarray]], num_train: int, num_held_out: int) -> dict[str, Any]:
    """tau of each codec, and the difference with an interval over prompts (the same draws on both
    sides), all seeds pooled; and the difference of each seed, which shows what chance does.
    """
    pooled = {codec: sum(rounds[codec]) for codec in CODECS}
    rows = [
        {"codec": c, "tau": tau(pooled[c]), "ci95": bootstrap_tau(*np.asarray(pooled[c]).T)}
        for c in CODECS
    ]
    draws = np.random.default_rng(0).integers(0, num_held_out, (2000, num_held_out))
    gaps = [tau(pooled["fp8"][d]) - tau(pooled["none"][d]) for d in draws]
    rows.append(
        {
            "codec": "fp8 - none",
            "tau": tau(pooled["fp8"]) - tau(pooled["none"]),
            "ci95": [float(x) for x in np.percentile(gaps, [2.5, 97.5])],
            "by_seed": [
                tau(f) - tau(n) for f, n in zip(rounds["fp8"], rounds["none"], strict=True)
            ],
            "none_by_seed": [tau(n) for n in rounds["none"]],
        }
    )
    return {"train": num_train, "held_out": num_held_out, "rows": rows}


def tau(counts: Any) -> float:
    """Tokens emitted per target call of [prompts, 2]."""
    return float(counts[:, 0].sum() / counts[:, 1].sum())


if __name__ == "__main__":
    main()
