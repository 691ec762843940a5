"""Drafters of the same run's data by speculators 0.9 and SpecForge 0.2, for table.py.

    python recipes/quality/peers.py data RUN STORE OUT       # draftsmith's environment; STORE has final: state
    python recipes/quality/peers.py speculators OUT          # theirs: pip install speculators==0.9.0
    python recipes/quality/peers.py specforge OUT            # pip install --no-deps specforge==0.2.0 yunchang
    python recipes/quality/table.py RUN --drafter speculators=OUT/speculators specforge=OUT/specforge

The same samples (held-out ones left out), features, drafter shape, epochs, learning rate, slot weights (said: unsaid,
speculators takes D-PACE and SpecForge gamma) and as near as they allow anchors and samples a step; everything
else as they set it by default. On a CPU speculators' trainer needs some calls replaced (for_cpu), and eager losses;
bf16 is made in fp32. `--weights` and `--seed` train another one beside: OUT/speculators-gamma-1.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "layer_types",
    "max_position_embeddings", "rope_theta",
)  # fmt: skip


def main() -> None:
    """One of the three."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("data", "speculators", "specforge"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--weights", choices=("dpace", "gamma"), help="in place of the run's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "data":
        return data(*args.paths)
    out = args.paths[0]
    about = json.loads((out / "about.json").read_text())
    about |= {"seed": args.seed} | ({"weights": args.weights} if args.weights else {})
    name = args.what if args.weights is None else f"{args.what}-{args.weights}-{args.seed}"
    {"speculators": speculators, "specforge": specforge}[args.what](out, about, out / name)


def data(run: Path, store: Path, out: Path) -> None:
    """Training samples in both layouts, and OUT/about.json: what the run trained, and how."""
    from draftsmith import configfile, train
    from draftsmith import tokenize as tokenize_stage
    from draftsmith.drafter.blocks import slot_weights
    from draftsmith.drafter.config import zlab_config
    from draftsmith.export_features import FOLDER, _save_data_set
    from draftsmith.store.foreign import write_sample
    from draftsmith.store.reader import StoreReader

    cfg = configfile.load(run / "run.yaml", {"run": str(run)})
    samples = tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg))
    reader, rows = StoreReader(store), []
    (out / "sf" / "rows").mkdir(parents=True)
    for sample in samples:
        if sample.split != "train":
            continue
        read = reader.read(sample.sample_id, ("hidden", "final", "input_ids", "loss_mask"))
        states = torch.cat([read["hidden"], read["final"][:, None]], dim=1)
        name = f"hs_{len(rows)}.safetensors"
        write_sample(out / "data" / FOLDER / name, read["input_ids"], states, fp8=False)
        record = {
            "input_ids": read["input_ids"].long(), "loss_mask": read["loss_mask"].long(),
            "hidden_states": read["hidden"].flatten(1)[None].bfloat16(),
        }  # fmt: skip
        torch.save(record, out / "sf" / "rows" / f"data_{len(rows)}.ckpt")
        ids, mask = read["input_ids"].tolist(), read["loss_mask"].tolist()
        rows.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
    _save_data_set(out / "data", rows)
    shape, settings = train.drafter_shape(cfg), cfg.train
    lengths = sum(row["seq_len"] for row in rows) / len(rows)
    about = {
        "target": str(Path(cfg.target.model).absolute()), "config": zlab_config(shape),
        "taps": list(shape.taps), "block": shape.block_size, "mask": shape.mask_token_id,
        "epochs": settings.epochs, "lr": settings.lr, "weights": settings.weights,
        "gamma": -1 / math.log(slot_weights(shape.block_size, settings.gamma)[2]),
        "tokens": settings.tokens_per_step, "anchors": settings.anchors_per_sample,
        "samples": max(1, round(settings.tokens_per_step / lengths)), "warmup": settings.warmup_ratio,
    }  # fmt: skip
    (out / "about.json").write_text(json.dumps(about, indent=1))
    print(f"{len(rows)} samples, {about['samples']} a step")


def speculators(out: Path, about: dict[str, Any], kept: Path) -> None:
    """Its last checkpoint."""
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    if not torch.accelerator.is_available():
        for_cpu()
    draft = {key: about["config"][key] for key in SHAPE_KEYS if key in about["config"]}
    draft |= {"model_type": "qwen3", "tie_word_embeddings": False}
    draft["rope_parameters"] = {"rope_type": "default", "rope_theta": draft.pop("rope_theta")}
    (out / "draft.json").write_text(json.dumps(draft))
    work = kept.with_name(f"{kept.name}-work")
    weights = {"dpace": "dpace", "gamma": "fixed-exp-decay"}[about["weights"]]
    flags = [
        "--speculator-type", "dflash", "--verifier-name-or-path", about["target"],
        "--data-path", out / "data", "--draft-config", out / "draft.json", "--save-path", work,
        "--target-layer-ids", *(tap + 1 for tap in about["taps"]), "--block-size", about["block"],
        "--mask-token-id", about["mask"], "--epochs", about["epochs"], "--lr", about["lr"],
        "--optimizer", "adamw", "--scheduler-type", "cosine",
        "--scheduler-warmup-ratio", about["warmup"], "--dflash-decay-gamma", about["gamma"],
        "--per-position-loss-weight", weights, "--loss-fn", "ce",
        "--max-anchors", about["samples"] * about["anchors"], "--total-seq-len", about["tokens"],
        "--train-data-ratio", 0.98, "--on-missing", "raise", "--num-workers", 0, "--log-freq", 100,
        "--seed", about["seed"], "--draft-attn-impl", "sdpa", "--loss-implementation", "eager",
    ]  # fmt: skip
    train(TrainConfig.resolve([str(flag) for flag in flags]))
    last = max((p for p in work.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    shutil.copytree(last, kept)


def for_cpu() -> None:
    """Its trainer moves the model to an integer rank and synchronizes an accelerator."""
    import speculators.train.trainer as trainer

    torch.accelerator.synchronize = lambda *args, **kwargs: None
    trainer.get_local_rank = lambda: torch.device("cpu")
    original = torch.autocast

    class CpuAutocast(original):
        def __init__(self, device_type: str, *args: object, **kwargs: object) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast = CpuAutocast
    quick_bf16()


def quick_bf16() -> None:
    """bf16 products of most CPUs are emulated, five and more times slower than fp32's: these are made in fp32
    and rounded, which is what a GPU's are.
    """
    linear = torch.nn.functional.linear

    def quick(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if dtype != torch.bfloat16:
            return linear(x, weight, bias)
        with torch.autocast("cpu", enabled=False):
            x, weight = x.to(dtype).float(), weight.to(dtype).float()
            return linear(x, weight, None if bias is None else bias.float()).to(dtype)

    torch.nn.functional.linear = quick


def specforge(out: Path, about: dict[str, Any], kept: Path) -> None:
    """Its last checkpoint, exported in z-lab's layout."""
    from specforge.cli import main as train

    work = kept.with_name(f"{kept.name}-work")
    config = {**about["config"], "dtype": "bfloat16", "attention_dropout": 0.0}
    (out / "sf_draft.json").write_text(json.dumps(config, indent=1))
    said = {
        "model": {
            "target_model_path": about["target"], "draft_model_config": str(out / "sf_draft.json"),
            "target_backend": "sglang", "torch_dtype": "bfloat16", "mask_token_id": about["mask"],
            "embedding_key": "model.embed_tokens.weight",
        },
        "data": {
            "hidden_states_path": str(out / "sf"), "max_length": about["tokens"],
            "chat_template": "qwen", "cache_dir": str(out / "sfcache"), "dataloader_num_workers": 0,
        },
        "training": {
            "strategy": "dflash", "num_epochs": about["epochs"], "batch_size": about["samples"],
            "learning_rate": about["lr"], "attention_backend": "sdpa", "fsdp_sharding": "NO_SHARD",
            "num_anchors": about["anchors"], "loss_decay_gamma": about["gamma"],
            "loss_type": {"dpace": "dpace", "gamma": "dflash"}[about["weights"]],
            "warmup_ratio": about["warmup"], "log_interval": 50, "seed": about["seed"],
        },
        "run_id": "sf", "output_dir": str(work),
        "deployment": {"mode": "local_colocated", "trainer": {"nnodes": 1, "nproc_per_node": 1}},
    }  # fmt: skip
    (out / "sf.yaml").write_text(json.dumps(said))  # YAML, too
    if not torch.accelerator.is_available():
        quick_bf16()
    if code := train(["train", "--config", str(out / "sf.yaml")]):
        raise SystemExit(code)
    command = str(Path(sys.executable).with_name("specforge"))
    last = max(work.rglob("*step*"), key=lambda path: path.stat().st_mtime)
    subprocess.run(
        [command, "export", "--to", "hf", "--checkpoint", str(last),
         "--draft-config", str(out / "sf_draft.json"), "--output-dir", str(kept)],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
