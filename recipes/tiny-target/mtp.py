"""Train an MTP head for a target of Qwen3.5's family on its own answers, and write the target with it.

    python recipes/tiny-target/mtp.py CONFIG OUT [--seconds 240]
    draftsmith evaluate CONFIG --target.model OUT --evaluate.methods "[ar, mtp, chain]" ...

CONFIG's run must be tokenized (`draftsmith tokenize CONFIG`). The head is one full-attention layer, as in
Qwen3.5's checkpoints (`mtp.*`, 15 tensors), trained on the token after next, and from its own output on the
one after that. Embedding, lm_head and all else are the target's and stay as they are. On a CPU the
target's states come from the library's plain torch rule.
"""

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import draftsmith.tokenize as tokenize_stage
from draftsmith import configfile
from draftsmith.core import Sample
from draftsmith.decode.mtp import PREFIX, MTPHead
from draftsmith.target.load import load_target, text_decoder, unembed

SAMPLES = 8  # a step
RATE = 2e-3
DEPTH = 3  # tokens drafted in training


def states(decoder: torch.nn.Module, samples: list[Sample]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids [n], final-normed states [n, H] and the loss mask [n] of each sample."""
    out = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor(sample.input_ids)
            hidden = decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            out.append((ids, hidden, torch.tensor(sample.loss_mask)))
    return out


def losses(
    head: MTPHead, embedding: Tensor, lm_head: Tensor, sample: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Sums of cross-entropy over supervised tokens at each depth, and hits and tokens [DEPTH, 2]."""
    ids, hidden, mask = sample
    total, counts = hidden.new_zeros(()), torch.zeros(DEPTH, 2)
    for depth in range(DEPTH):
        if len(ids) < depth + 3:
            break
        positions = torch.arange(depth, len(ids) - 2)
        hidden = head(embedding[ids[depth + 1 : -1]], hidden[: len(positions)], positions)
        wanted, counted = ids[depth + 2 :], mask[depth + 2 :].bool()
        logits = hidden[counted] @ lm_head.T
        total = total + F.cross_entropy(logits, wanted[counted], reduction="sum")
        counts[depth, 0] = (logits.argmax(-1) == wanted[counted]).sum()
        counts[depth, 1] = counted.sum()
    return total, counts


def train(head: MTPHead, shared: tuple[Tensor, Tensor], data: list, seconds: float) -> None:
    """AdamW until the clock says so; the rate falls linearly."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95))
    random, begun, said = np.random.default_rng(0), time.monotonic(), 0.0
    counts, step = torch.zeros(DEPTH, 2), 0
    while (elapsed := time.monotonic() - begun) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - elapsed / seconds)
        for i in random.choice(len(data), min(SAMPLES, len(data)), replace=False):
            loss, its = losses(head, *shared, data[i])
            (loss / SAMPLES / 32).backward()
            counts += its
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if elapsed - said > 15:
            said, rates = elapsed, (counts[:, 0] / counts[:, 1]).tolist()
            print(
                f"{elapsed:4.0f} s, step {step}: right {[round(r, 3) for r in rates]}", flush=True
            )
            counts.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    known = parser.parse_args()
    cfg = configfile.load(known.config)
    samples = tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg))
    target = load_target(cfg.target, dtype=torch.float32).cpu()
    embedding, lm_head, _ = unembed(target)
    torch.manual_seed(0)
    head = MTPHead(target)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    chosen = [s for s in samples if s.split == "train"]
    train(head, (embedding, lm_head), states(text_decoder(target), chosen), known.seconds)
    shutil.copytree(cfg.target.model, known.out, dirs_exist_ok=True)
    tensors = {
        PREFIX + name: tensor.to(torch.bfloat16) for name, tensor in head.state_dict().items()
    }
    weights = known.out / "model.safetensors"
    whole = {**load_file(weights), **tensors}
    save_file(whole, weights, metadata={"format": "pt"})
    size = sum(t.numel() for t in tensors.values()) / 1e6
    print(f"{known.out}: {len(tensors)} tensors {PREFIX}*, {size:.2f}M parameters")


if __name__ == "__main__":
    main()
