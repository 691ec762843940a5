"""`draftsmith demo`: the whole pipeline on the built-in tiny hybrid, on two CPU cores, in minutes.

The target is a real, small Qwen3.5-type language model (docs/tiny-target.md); the prompts come from
files that it was not trained on.
"""

from importlib import resources
from typing import Any

from draftsmith import configfile, pipeline

ASSETS = "assets"
DEMO: dict[str, Any] = {
    "target": {"dtype": "float32", "device": "cpu"},
    "prepare": {"held_out": 0.02, "max_samples": 2900, "max_held_out": 28},
    "regenerate": {
        "max_new_tokens": 64,
        "batch_size": 240,
        "answers_per_file": 720,
        "loop_ngram": 12,
    },
    "tokenize": {"max_length_tokens": 512, "template_kwargs": {}},
    "features": {"taps": [3, 5, 6]},  # the deepest a server can read: best in trials
    "extract": {"tokens_per_batch": 4096},
    "drafter": {"layers": 2, "block_size": 8},
    "train": {
        "epochs": 4,
        "lr": 3.0e-3,
        "anchors_per_sample": 4,
        "tokens_per_step": 1024,  # small steps: it takes some hundred before drafts are accepted
        "micro_batch_tokens": 1024,
        "log_every": 20,
        "checkpoint_every": 200,
    },
    "evaluate": {
        "methods": ["ar", "lookup", "chain", "untrained", "shuffled"],
        "max_prompts": 28,
        "max_new_tokens": 64,
        "loop_ngram": 12,
    },
}


def run(folder: str, overrides: dict[str, Any]) -> int:
    """Run it in `folder`."""
    assets = resources.files("draftsmith") / ASSETS
    with resources.as_file(assets) as path:
        data = {**DEMO, "run": folder}
        data["target"] = {**DEMO["target"], "model": str(path / "tiny-hybrid")}
        data["prepare"] = {
            **DEMO["prepare"],
            "sources": [{"path": str(path / "demo-prompts.jsonl")}],
        }
        cfg = configfile.with_overrides(data, overrides, where="the demo")
        pipeline.run(cfg)
    return 0
