"""What each choice of training is worth on a run's data: drafters that differ in one thing, and drafters that
other tools trained, by tau on the run's held-out texts.

    draftsmith demo --run runs/quality --prepare.max_held_out 200
    python recipes/quality/table.py runs/quality --seeds 2 [--drafter NAME=FOLDER ...]

The run gives conversations, answers and tokens; what else is needed is extracted and trained below
RUN/quality and kept, so that the command goes on where it was stopped. tau is replayed along each text
(train/verdict.py); intervals are bootstraps over texts, differences from the first row paired: the same
texts on both sides. Prints a table in Markdown.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import draftsmith.tokenize as tokenize_stage
from draftsmith import configfile, pipeline, train
from draftsmith.config import RunConfig
from draftsmith.drafter.checkpoint import find_drafter, load_drafter
from draftsmith.files import digest, write_json
from draftsmith.monitor.state import NoReport
from draftsmith.ranks import Ranks
from draftsmith.target.load import inspect_target
from draftsmith.target.taps import auto_taps
from draftsmith.train.checkpoints import checkpoints
from draftsmith.train.microbatch import Forward
from draftsmith.train.sources import open_source
from draftsmith.train.verdict import Judge

VARIANTS: dict[str, dict[str, Any]] = {
    "D-PACE, ce (the base)": {},
    "gamma auto": {"train.weights": "gamma"},
    "gamma 2": {"train.weights": "gamma", "train.gamma": 2.0},
    "KL": {"train.loss": "kl", "features.final": "state"},
    "TV": {"train.loss": "tv", "features.final": "state"},
    "labels: target": {"train.labels": "target", "features.final": "argmax"},
    "block 16": {"drafter.block_size": 16},
    "5 taps": {"taps": 5},
    "sliding layers": {"sliding": True},
}
BASE = next(iter(VARIANTS))
DRAWS = 4000


def variant(base: RunConfig, name: str, seed: int, changes: dict[str, Any]) -> RunConfig:
    """The run of this variant, on the base's data; features are shared by all that read the same."""
    keys = dict(changes)
    num_layers = inspect_target(base.target).num_layers
    if "taps" in keys:
        keys["features.taps"] = auto_taps(num_layers, keys.pop("taps"))
    if keys.pop("sliding", False):
        keys["drafter.layer_types"] = ["sliding_attention"] * base.drafter.layers
    root = base.root / "quality"
    said = {k: v for k, v in keys.items() if k.startswith("features.")}
    slug = "".join(c if c.isalnum() else "-" for c in name)
    keys |= {
        "run": str(root / f"{slug}-{seed}"),
        "features.store": str(root / f"features-{digest(said)[:8]}"),
        "train.seed": seed,
    }
    data = base.model_dump(mode="json")
    cfg = configfile.with_overrides(data, keys, where=str(base.root / "run.yaml"))
    cfg.root.mkdir(parents=True, exist_ok=True)
    link = cfg.root / "data"
    if not link.exists():
        link.symlink_to((base.root / "data").absolute())
    return cfg


def walks(cfg: RunConfig, folder: Path, kept: Path) -> np.ndarray:
    """[texts, 2]: tokens emitted and rounds along each held-out answer."""
    if kept.exists():
        return np.array(json.loads(kept.read_text()))
    cfg = cfg.model_copy(
        update={"train": cfg.train.model_copy(update={"verdict_prompts": 1 << 30})}
    )
    layers = inspect_target(cfg.target).num_layers
    drafter = load_drafter(folder, round_to=torch.bfloat16, num_target_layers=layers)
    tokens, taps = tokenize_stage.finished(cfg), list(drafter.shape.taps)
    opened = open_source(cfg, tokens, taps, "store", Ranks())
    drafter.share(*opened.shared).eval()
    forward = Forward(cfg, drafter, drafter, None)
    judge = Judge(
        cfg.root, opened.held_out_samples, opened.held_out, forward.hits, num_steps=1,
        block_size=drafter.shape.block_size, blocks_together=cfg.train.blocks_together,
        report=NoReport(), ranks=Ranks(),
    )  # fmt: skip
    counted = [[own.tokens, own.rounds] for own, _ in dict(sorted(judge.texts().items())).values()]
    write_json(kept, counted)
    return np.array(counted)


def row(name: str, mine: np.ndarray, base: np.ndarray, spread: list[float]) -> str:
    """tau with its interval, and the difference from the base with one."""
    picks = np.random.default_rng(0).integers(0, len(mine), (DRAWS, len(mine)))
    draws = [x[picks].sum(1) for x in (mine, base)]
    taus = [d[:, 0] / d[:, 1] for d in draws]
    low, high = np.percentile(taus[0], [2.5, 97.5])
    worse, better = np.percentile(taus[0] - taus[1], [2.5, 97.5])
    tau, other = (x.sum(0)[0] / x.sum(0)[1] for x in (mine, base))
    seeds = " ".join(f"{x:.2f}" for x in spread)
    return (
        f"| {name} | {tau:.3f} | {low:.2f}-{high:.2f} | {tau - other:+.3f} | {worse:+.2f} to "
        f"{better:+.2f} | {seeds} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="beginnings of variants' names")
    parser.add_argument("--drafter", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="for every variant"
    )
    args = parser.parse_args()
    overrides = dict(pair.split("=", 1) for pair in args.set)
    base = configfile.load(args.run / "run.yaml", {"run": str(args.run), **overrides})
    lines, first = [], None
    for name, changes in VARIANTS.items():
        if args.only and first is not None and not name.startswith(tuple(args.only)):
            continue
        found = []
        for seed in range(args.seeds):
            cfg = variant(base, name, seed, changes)
            pipeline.run(cfg, ["extract", "train"])
            folder = checkpoints(train.folder(cfg))[-1]
            found.append(walks(cfg, folder, cfg.root / "walks.json"))
        total = sum(found)
        first = total if first is None else first
        lines.append(row(name, total, first, [x[:, 0].sum() / x[:, 1].sum() for x in found]))
    for pair in args.drafter:
        name, _, path = pair.partition("=")
        assert first is not None, "the base comes first"
        kept = base.root / "quality" / f"walks-{name}.json"
        cfg = variant(base, BASE, 0, VARIANTS[BASE])
        mine = walks(cfg, find_drafter(path), kept) * args.seeds
        lines.append(row(name, mine, first, [mine[:, 0].sum() / mine[:, 1].sum()]))
    print("| drafter | tau | 95% | difference | 95%, paired | tau of each seed |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
