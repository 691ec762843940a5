"""Measure the saved tiny target on the CPU: losses, greedy answers, loops, samples.

    python recipes/tiny-target/check.py --work runs/tiny-target --assets src/draftsmith/assets

Run prepare.py before. Prints one JSON object, then samples of prompts with their greedy answers.
"""

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from data import IGNORED, ChatData, TextData

REPEATED_TOKENS = 12
MAX_NEW_TOKENS = 96


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, torch.Tensor]:
    """Total nats over the labelled tokens, and these tokens."""
    nats, labelled = 0.0, []
    for input_ids_BT, labels_BT in batches:
        logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
        labels = labels_BT[:, 1:].flatten()
        nats += float(
            F.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
            )
        )
        labelled.append(labels[labels != IGNORED])
    return nats, torch.cat(labelled)


def describe_loss(
    tokenizer: PreTrainedTokenizerBase, nats: float, tokens: torch.Tensor
) -> dict[str, float]:
    """Nats a token and bits a byte."""
    num_bytes = len(tokenizer.decode(tokens.tolist()).encode())
    per_token = round(nats / len(tokens), 4)
    return {"nats_per_token": per_token, "bits_per_byte": round(nats / math.log(2) / num_bytes, 4)}


@torch.no_grad()
def answer_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], batch: int
) -> list[list[int]]:
    """Greedy answers in left-padded batches; each ends with <|im_end|> or at the limit."""
    answers = []
    for start in range(0, len(prompts), batch):
        inputs = tokenizer(prompts[start : start + batch], padding=True, return_tensors="pt")
        outputs = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for row in outputs[:, inputs.input_ids.shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else None
            answers.append(row[:end])
    return answers


def has_loop(ids: list[int]) -> bool:
    """Whether some run of REPEATED_TOKENS tokens occurs twice."""
    runs = [tuple(ids[i : i + REPEATED_TOKENS]) for i in range(len(ids) - REPEATED_TOKENS + 1)]
    return len(set(runs)) < len(runs)


def main() -> None:
    """Print every number that docs/tiny-target.md quotes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/tiny-target"))
    parser.add_argument("--assets", type=Path, default=Path("src/draftsmith/assets"))
    parser.add_argument("--num_prompts", type=int, default=512)
    parser.add_argument("--num_text_rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples_per_source", type=int, default=2)
    args = parser.parse_args()

    folder = args.assets / "tiny-hybrid"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded[0].eval(), loaded[1]
    assert not any(info.values()), f"the weights do not match the class: {info}"

    text = TextData(args.work / "held_out.bin", "cpu")
    chats = ChatData(args.work / "held_out_chats.npz", "cpu")
    text_batches = text.eval_batches(
        4096, row_tokens=512, num_batches=max(1, args.num_text_rows // 8)
    )
    lines = (args.work / "judged-prompts.jsonl").read_text().splitlines()[: args.num_prompts]
    records = [json.loads(line) for line in lines]
    prompts = [
        tokenizer.apply_chat_template(r["messages"], tokenize=False, add_generation_prompt=True)
        for r in records
    ]
    start = time.perf_counter()
    answers = answer_greedily(model, tokenizer, prompts, args.batch)
    elapsed_s = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_bytes": (folder / "model.safetensors").stat().st_size,
        "text": describe_loss(tokenizer, *held_out_loss(model, text_batches)),
        "chat_answers": describe_loss(tokenizer, *held_out_loss(model, chats.eval_batches())),
        "prompts": len(prompts),
        "loop_rate": round(float(np.mean([has_loop(answer) for answer in answers])), 4),
        "end_rate": round(float(np.mean([a[-1] == tokenizer.eos_token_id for a in answers])), 4),
        "distinct_answers": len({tuple(answer) for answer in answers}),
        "answer_tokens": {
            "mean": round(float(np.mean(lengths)), 1),
            "median": float(np.median(lengths)),
            "p95": float(np.percentile(lengths, 95)),
        },
        "answer_tokens_per_s": round(sum(lengths) / elapsed_s),
        "batch": args.batch,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(report))
    shown: Counter[str] = Counter()
    for record, answer in zip(records, answers, strict=True):
        shown[record["source"]] += 1
        if shown[record["source"]] <= args.samples_per_source:
            print(f"\n===== {record['source']}\n{record['messages'][0]['content']}\n----- answer")
            print(tokenizer.decode(answer))


if __name__ == "__main__":
    main()
