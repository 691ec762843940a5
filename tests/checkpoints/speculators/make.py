r"""Makes this folder's checkpoint with the package `speculators` itself: trains a small DFlash drafter
for the built-in tiny hybrid, saves it as the package does, and keeps what the package computes with it.

    python -m venv spec && spec/bin/pip install torch==2.13.0 speculators==0.9.0 transformers==5.19.0
    draftsmith demo --run runs/spec --prepare.max_samples 900 --features.taps "[3, 6]" \
        --features.final state --features.dtype float32 --train.max_steps 1
    spec/bin/python tests/checkpoints/speculators/make.py runs/spec/features [WORK]   # 10 minutes

A CPU's torch has no torchvision or torchaudio to match: uninstall them should importing fail.
Written here: checkpoint/ (config.json, model.safetensors as `speculators train` leaves them),
outputs.safetensors, and configs/ (what `speculators train --dry-run` writes with other flags).
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parents[2] / "src" / "draftsmith" / "assets"
TARGET = "tiny-hybrid"  # relative: the checkpoint names it
HIDDEN, LAYERS, VOCAB, BLOCK, WINDOW = 256, 8, 3072, 8, 24
AUX_IDS = [4, 7]  # taps 3 and 6
ANCHORS = [2, 9, 16, 31, 45]  # the last two stand further than the window from the first token
TOKENS, COLUMNS = 64, 48  # of the compared texts; every 48th logit is kept
DRAFT = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "rope_parameters": {  # no default's theta; the sections as the package writes them for Qwen3.5
        "rope_type": "default",
        "rope_theta": 20000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [3, 3, 2],
    },
    "tie_word_embeddings": False,
}
ALWAYS = ["--verifier-name-or-path", TARGET, "--draft-attn-impl", "sdpa"]
ALWAYS += ["--loss-implementation", "eager"]  # flex attention and the fused loss need a GPU
OTHERS = {
    "defaults": "--speculator-type dflash",
    "llama-full": "--speculator-type dflash --draft-arch llama --num-layers 2 --full-attention-indices 1",
    "non-causal": "--speculator-type dflash --num-layers 2 --sliding-window-non-causal",
    "partial-rotary": "--speculator-type dflash --num-layers 2 --no-draft-mrope-full-head-hack",
    "from-anchor": "--speculator-type dflash --num-layers 2 --sample-from-anchor",
    "embeddings-tapped": "--speculator-type dflash --num-layers 2 --target-layer-ids 0 4 7",
    "last-tapped": "--speculator-type dflash --num-layers 2 --target-layer-ids 4 8",
    "unordered": "--speculator-type dflash --num-layers 2 --target-layer-ids 7 4",
    "small-vocabulary": "--speculator-type dflash --num-layers 2 --draft-vocab-size 512",
    "dspark": "--speculator-type dspark --num-layers 2",
    "dflash2": "--speculator-type dflash2 --num-layers 2",
    "eagle3": "--speculator-type eagle3",
}


def for_cpu() -> None:
    """The trainer moves the model to an integer rank and synchronizes an accelerator."""
    import speculators.train.trainer as trainer

    torch.accelerator.synchronize = lambda *args, **kwargs: None
    trainer.get_local_rank = lambda: torch.device("cpu")
    original = torch.autocast

    class CpuAutocast(original):
        def __init__(self, device_type, *args, **kwargs):
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast = CpuAutocast


def train(flags: list[str]) -> None:
    """`speculators train` with these flags, in this process."""
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    main(TrainConfig.resolve([*ALWAYS, *flags]))


def write_data(store: Path, out: Path) -> None:
    """The store's samples in the layout that speculators trains on."""
    from datasets import Dataset

    rows = []
    (out / "hidden_states").mkdir(parents=True)
    counts = torch.zeros(VOCAB, dtype=torch.long)
    for path in sorted(store.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as file:
            offsets = file.get_tensor("offsets").tolist()
            parts = {name: file.get_slice(name) for name in ("hidden", "final", "input_ids")}
            masks = file.get_slice("loss_mask")
            for start, end in zip(offsets, offsets[1:], strict=False):
                hidden, final, ids = (part[start:end] for part in parts.values())
                states = torch.cat([hidden, final[:, None]], 1)
                sample = {"token_ids": ids.long(), "hidden_states": states.bfloat16().contiguous()}
                save_file(sample, out / "hidden_states" / f"hs_{len(rows)}.safetensors")
                counts += torch.bincount(ids, minlength=VOCAB)
                rows.append(
                    {
                        "input_ids": ids.long().tolist(),
                        "loss_mask": masks[start:end].long().tolist(),
                        "seq_len": end - start,
                    }
                )
    dataset = Dataset.from_list(rows)
    dataset.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    dataset.save_to_disk(out)
    torch.save(dict(enumerate(counts.tolist())), out / "token_freq.pt")


def target_features(ids: torch.Tensor) -> torch.Tensor:
    """The target's states [1, S, taps, H] at the checkpoint's layer ids, as Transformers counts
    them: 0 the embeddings, i the output of i layers.
    """
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.stack([states[i] for i in AUX_IDS], 2)


@torch.no_grad()
def outputs(checkpoint: Path, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the package's own forward gives in fp32: for random features and tokens, and for the
    target's features of a text.
    """
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DFlashDraftModel.from_pretrained(checkpoint, config=config, dtype=torch.float32).eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(1, TOKENS, len(AUX_IDS), HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(3, 3000, (1, TOKENS), generator=generator)
    out = {"anchors": torch.tensor(ANCHORS), "random.features": random[0]}
    given = {"random": (ids, random.float()), "text": (text, target_features(text))}
    for name, (ids, features) in given.items():
        anchors = torch.zeros(1, TOKENS, dtype=torch.long)
        anchors[0, ANCHORS] = 1  # as many as are asked for: all of them, in order
        hidden, logits, *_ = model._backbone_forward(
            hidden_states=features.flatten(2),
            input_ids=ids,
            loss_mask=anchors,
            verifier_last_hidden_states=torch.zeros(1, TOKENS, HIDDEN),
            document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
        shape = (len(ANCHORS), BLOCK, -1)
        out[f"{name}.input_ids"] = ids[0]
        out[f"{name}.hidden"] = hidden[0].view(shape).contiguous()
        out[f"{name}.logits"] = logits[0, :, ::COLUMNS].reshape(shape).contiguous()
        out[f"{name}.argmax"] = logits[0].argmax(-1).view(shape[:2]).contiguous()
    return out


def some_text(data: Path) -> torch.Tensor:
    """The first sample that is long enough, cut."""
    from datasets import load_from_disk

    rows = load_from_disk(data).with_format(None)["input_ids"]
    return torch.tensor([next(ids for ids in rows if len(ids) >= TOKENS)[:TOKENS]])


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    store = Path(sys.argv[1]).resolve()
    work = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()).resolve()
    os.chdir(ASSETS)
    torch.manual_seed(0)
    if not torch.accelerator.is_available():
        for_cpu()
    if not (work / "data").exists():
        write_data(store, work / "data")
    (work / "draft.json").write_text(json.dumps(DRAFT))
    data = ["--data-path", str(work / "data")]
    train(
        ["--speculator-type", "dflash", *data, "--draft-config", str(work / "draft.json")]
        + ["--target-layer-ids", *map(str, AUX_IDS), "--block-size", str(BLOCK)]
        + ["--save-path", str(work / "ckpt"), "--epochs", "4"]
        + ["--optimizer", "adamw", "--lr", "3e-3", "--max-anchors", "64", "--total-seq-len", "1024"]
        + ["--on-missing", "raise", "--num-workers", "0", "--log-freq", "100", "--seed", "0"]
    )
    last = max(
        (p for p in (work / "ckpt").iterdir() if p.name.isdigit()), key=lambda p: int(p.name)
    )
    (HERE / "checkpoint").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(last / name, HERE / "checkpoint" / name)
    given = outputs(HERE / "checkpoint", some_text(work / "data"))
    save_file(given, HERE / "outputs.safetensors")
    (HERE / "configs").mkdir(exist_ok=True)
    for name, flags in OTHERS.items():
        shutil.rmtree(work / "dry", ignore_errors=True)
        train([*flags.split(), *data, "--dry-run", "--save-path", str(work / "dry")])
        shutil.copyfile(work / "dry" / "config.json", HERE / "configs" / f"{name}.json")


if __name__ == "__main__":
    main()
