"""Train the tiny target: plain text first, then chats mixed with plain text.

    python recipes/tiny-target/train.py --work runs/tiny-target --out runs/tiny-target/model

Run prepare.py before. The same script runs on a CPU, slowly: add --device cpu --text_s 20
--chat_s 20 --batch_tokens 2048. The two budgets are in seconds; the learning rate follows the
clock (2.5e-3 to 1e-3 on text, 1.5e-3 to zero on chats).
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import build_model, save_model, use_training_kernels
from torch import nn

from data import IGNORED, ChatData, TextData

EVAL_INTERVAL_S = 30


def make_optimizer(model: nn.Module, *, rate: float, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def token_losses(
    model: nn.Module, input_ids_BT: torch.Tensor, labels_BT: torch.Tensor
) -> torch.Tensor:
    """Mean next-token loss over the labelled tokens; bf16 compute on a GPU, fp32 softmax."""
    on_gpu = input_ids_BT.is_cuda  # bf16 is far slower than fp32 on most CPUs
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=on_gpu):
        logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    return F.cross_entropy(
        logits_BTV[:, :-1].float().flatten(0, 1),
        labels_BT[:, 1:].flatten(),
        ignore_index=IGNORED,
    )


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Mean loss in nats per labelled token over fixed held-out batches."""
    total, count = 0.0, 0
    for input_ids_BT, labels_BT in batches:
        num = int((labels_BT[:, 1:] != IGNORED).sum())
        total += float(token_losses(model, input_ids_BT, labels_BT)) * num
        count += num
    return total / count


def rate_factor(progress: float, *, final: float, warmup: float = 0.04) -> float:
    """Linear warm-up, then a cosine to `final`, over the share of the time budget."""
    if progress < warmup:
        return max(0.01, progress / warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
    return final + (1 - final) * cosine


def train_phase(
    name: str,
    model: nn.Module,
    next_batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    evals: dict[str, list],
    *,
    budget_s: float,
    rate: float,
    final_factor: float,
    log: Callable[[dict], None],
    save: Callable[[], None],
) -> None:
    """Train for `budget_s` seconds after the first step (whose kernels compile)."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, rate=rate, fused=device.type == "cuda")
    start, last_eval, step, tokens, losses = time.perf_counter(), 0.0, 0, 0, []
    running = True
    while running:
        elapsed = time.perf_counter() - start
        running = elapsed < budget_s
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_factor(elapsed / budget_s, final=final_factor)
        input_ids_BT, labels_BT = next_batch(step)
        loss = token_losses(model, input_ids_BT, labels_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        tokens += input_ids_BT.numel()
        step += 1
        if step == 3:  # kernels are compiled and tuned now
            log({"phase": name, "start_up_s": round(time.perf_counter() - start, 1)})
            start, tokens = time.perf_counter(), 0
        if step % 16 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # keeps the clock honest
        if not running or elapsed - last_eval > EVAL_INTERVAL_S:
            last_eval = elapsed
            record = {"phase": name, "step": step, "elapsed_s": round(elapsed, 1)}
            record |= {"tokens": tokens, "tokens_per_s": round(tokens / max(elapsed, 1e-6))}
            record |= {"train_loss": round(float(torch.stack(losses).mean()), 4)}
            record |= {key: round(evaluate(model, value), 4) for key, value in evals.items()}
            log(record)
            if not math.isfinite(record["train_loss"]):
                raise FloatingPointError("the loss diverged: lower the learning rate")
            losses = []
            save()


def main() -> None:
    """Train both phases and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/tiny-target"))
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-target/model"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--text_s", type=float, default=74)
    parser.add_argument("--chat_s", type=float, default=90)
    parser.add_argument("--text_rate", type=float, default=2.5e-3)
    parser.add_argument("--chat_rate", type=float, default=1.5e-3)
    parser.add_argument("--batch_tokens", type=int, default=65536)
    parser.add_argument("--num_eval_batches", type=int, default=16)
    parser.add_argument("--start", type=Path, help="a saved model to start from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(20)
    torch.set_float32_matmul_precision("high")
    use_training_kernels()

    model = build_model(args.start).to(args.device).train()
    print(f"parameters: {sum(p.numel() for p in model.parameters())}", flush=True)
    rng = np.random.default_rng(20)
    text = TextData(args.work / "train.bin", args.device)
    chats = ChatData(args.work / "train_chats.npz", args.device)
    text_evals = TextData(args.work / "held_out.bin", args.device).eval_batches(args.batch_tokens)
    chat_evals = ChatData(args.work / "held_out_chats.npz", args.device).eval_batches()
    text_evals, chat_evals = (e[: args.num_eval_batches] for e in (text_evals, chat_evals))
    evals = {"held_out_text": text_evals, "held_out_chat": chat_evals}

    def log(record: dict) -> None:
        print(json.dumps(record), flush=True)
        with (args.out / "train.jsonl").open("a") as out:
            out.write(json.dumps(record) + "\n")

    def next_text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return text.sample(rng, num_tokens=args.batch_tokens, row_tokens=512 if step % 8 else 1024)

    def next_mixed(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step % 4 == 3:
            return next_text(step)
        return chats.sample(rng, num_tokens=args.batch_tokens)

    if args.text_s > 0:
        train_phase(
            "text", model, next_text, {"held_out_text": text_evals}, budget_s=args.text_s,
            rate=args.text_rate, final_factor=0.4, log=log,
            save=lambda: save_model(model, args.out / "text"),
        )  # fmt: skip
    train_phase(
        "chat", model, next_mixed, evals, budget_s=args.chat_s, rate=args.chat_rate,
        final_factor=0.0, log=log, save=lambda: save_model(model, args.out / "chat"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
