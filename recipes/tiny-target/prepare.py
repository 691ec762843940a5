"""Build the tiny target's data: tokenizer, token streams, training chats and demo prompts.

    python recipes/tiny-target/prepare.py --work runs/tiny-target --assets src/draftsmith/assets

Reads only this interpreter's standard library. Files are split by a hash of their path first;
held-out files give the demo prompts and the held-out losses and are never trained on.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from chats import Chat, find_functions, make_chats
from corpus import SourceFile, read_sources, train_tokenizer
from transformers import PreTrainedTokenizerFast

SEED = 20
MAX_PROMPT_TOKENS = 112  # with the chat's own tokens
MAX_ANSWER_TOKENS = 64  # with <|im_end|>
WORDINGS_PER_FUNCTION = 3
NUM_CHOSEN = 6050
MAX_DEMO_PROMPT_TOKENS = 76  # short ones: more distinct answers in the demo's minutes
MIN_ANSWER_TOKENS = 20  # of the reference answer; docstrings are exempt
NUM_EVAL_CHATS = 1500
EVAL_SHARES = {  # every task: what the target is judged on
    "explain": 0.42, "facts": 0.20, "complete": 0.12, "continue": 0.18, "docstring": 0.08
}  # fmt: skip
DEMO_SHARES = {  # no docstrings: a dozen tokens each teach a drafter next to nothing
    "explain": 0.50, "facts": 0.30, "complete": 0.10, "continue": 0.10
}  # fmt: skip


def collect_chats(files: Iterable[SourceFile], *, num_rounds: int, seed: int) -> list[Chat]:
    """Make every chat of these files, without repeated prompts."""
    chats: dict[str, Chat] = {}
    for file in files:
        for function in find_functions(file.text):
            for round_id in range(num_rounds):
                rng = random.Random(f"{seed}:{file.path}:{function.node.lineno}:{round_id}")
                for chat in make_chats(function, rng):
                    chats.setdefault(chat.prompt, chat)
    return list(chats.values())


def encode_chats(
    tokenizer: PreTrainedTokenizerFast, chats: list[Chat]
) -> list[tuple[Chat, list[int], list[int]]]:
    """Tokenize prompt and answer as the chat template does; drop the long ones."""
    prompts = [
        f"<|im_start|>user\n{chat.prompt}<|im_end|>\n<|im_start|>assistant\n" for chat in chats
    ]
    prompt_ids = tokenizer(prompts).input_ids
    answer_ids = tokenizer([chat.answer + "<|im_end|>" for chat in chats]).input_ids
    return [
        (chat, prompt, answer)
        for chat, prompt, answer in zip(chats, prompt_ids, answer_ids, strict=True)
        if len(prompt) <= MAX_PROMPT_TOKENS and len(answer) <= MAX_ANSWER_TOKENS
    ]


def save_chats(path: Path, encoded: list[tuple[Chat, list[int], list[int]]]) -> None:
    """Store chats as one flat token array plus lengths and the task's name."""
    flat = [token for _, prompt, answer in encoded for token in prompt + answer]
    np.savez_compressed(
        path,
        tokens=np.array(flat, dtype=np.uint16),
        prompt_tokens=np.array([len(prompt) for _, prompt, _ in encoded], dtype=np.int32),
        answer_tokens=np.array([len(answer) for _, _, answer in encoded], dtype=np.int32),
        sources=np.array([chat.source for chat, _, _ in encoded]),
    )


def save_stream(path: Path, tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> int:
    """Store documents as one token stream, <|endoftext|> after each; return its length."""
    ids = tokenizer([file.text for file in files]).input_ids
    flat = [token for document in ids for token in [*document, tokenizer.pad_token_id]]
    np.array(flat, dtype=np.uint16).tofile(path)
    return len(flat)


def choose_prompts(
    encoded: list[tuple[Chat, list[int], list[int]]],
    shares: dict[str, float],
    *,
    trained: list[Chat],
    seed: int,
) -> list[Chat]:
    """Pick distinct held-out prompts near the wanted shares, none seen in training."""
    rng = random.Random(seed)
    seen = {chat.key for chat in trained}
    pools: dict[str, list[Chat]] = {source: [] for source in shares}
    for chat, _, answer in rng.sample(encoded, len(encoded)):
        long_enough = len(answer) >= MIN_ANSWER_TOKENS or chat.source == "docstring"
        if long_enough and chat.source in pools and chat.key not in seen:
            seen.add(chat.key)
            pools[chat.source].append(chat)
    print("distinct held-out prompts:", {source: len(pool) for source, pool in pools.items()})
    chosen = [
        chat
        for source, share in shares.items()
        for chat in pools[source][: round(share * NUM_CHOSEN)]
    ]
    rng.shuffle(chosen)
    return chosen


def save_prompts(path: Path, chats: list[Chat]) -> None:
    """Write prompts as a messages file."""
    with path.open("w") as out:
        for chat in chats:
            message = {"role": "user", "content": chat.prompt}
            out.write(json.dumps({"messages": [message], "source": chat.source}) + "\n")


def describe(name: str, encoded: list[tuple[Chat, list[int], list[int]]]) -> None:
    """Print the counts and answer lengths of a set of chats."""
    print(f"{name}: {len(encoded)} chats")
    for source, count in Counter(chat.source for chat, _, _ in encoded).items():
        lengths = [len(answer) for chat, _, answer in encoded if chat.source == source]
        p10, p50, p95 = np.percentile(lengths, [10, 50, 95])
        print(f"  {source}: {count}, answer tokens p10 {p10:.0f} p50 {p50:.0f} p95 {p95:.0f}")


def main() -> None:
    """Write everything train.py and check.py need."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/tiny-target"))
    parser.add_argument("--assets", type=Path, default=Path("src/draftsmith/assets"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    files = read_sources()
    train = [file for file in files if not file.held_out]
    held_out = [file for file in files if file.held_out]
    tokenizer = train_tokenizer([file.text for file in train])
    tokenizer.save_pretrained(args.assets / "tiny-hybrid")

    trained_chats = collect_chats(train, num_rounds=WORDINGS_PER_FUNCTION, seed=SEED)
    train_chats = encode_chats(tokenizer, trained_chats)
    held_out_chats = encode_chats(tokenizer, collect_chats(held_out, num_rounds=1, seed=SEED))
    save_chats(args.work / "train_chats.npz", train_chats)
    judged = choose_prompts(held_out_chats, EVAL_SHARES, trained=trained_chats, seed=SEED)
    judged_prompts = {chat.prompt for chat in judged[:NUM_EVAL_CHATS]}
    evaluated = [item for item in held_out_chats if item[0].prompt in judged_prompts]
    save_chats(args.work / "held_out_chats.npz", evaluated)
    short = [item for item in held_out_chats if len(item[1]) <= MAX_DEMO_PROMPT_TOKENS]
    demo = choose_prompts(short, DEMO_SHARES, trained=trained_chats, seed=SEED)
    save_prompts(args.work / "judged-prompts.jsonl", judged)
    save_prompts(args.assets / "demo-prompts.jsonl", demo)

    stats = {
        "train_files": len(train),
        "held_out_files": len(held_out),
        "train_tokens": save_stream(args.work / "train.bin", tokenizer, train),
        "held_out_tokens": save_stream(args.work / "held_out.bin", tokenizer, held_out),
        "train_bytes": sum(len(file.text.encode()) for file in train),
        "held_out_bytes": sum(len(file.text.encode()) for file in held_out),
        "train_chats": len(train_chats),
        "demo_prompts": len(demo),
    }
    (args.work / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
    describe("train", train_chats)
    describe("held out", held_out_chats)
    print(json.dumps(stats))


if __name__ == "__main__":
    main()
