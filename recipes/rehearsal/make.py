"""What a rehearsal runs on: a target of any configuration with random weights, and synthetic conversations.

    python recipes/rehearsal/make.py OUT --model qwen3.6-27b --conversations 2000 --tokens 1000

Writes OUT/target (sharded safetensors in bf16, the built-in tokenizer) and OUT/chats.jsonl. Speed and memory
do not depend on what weights and texts say. The largest model takes 54 GB of disk, and a GPU to draw it on.
"""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import GenerationConfig

from draftsmith.bench.models import config_of, random_target

ASSETS = Path(__file__).parents[2] / "src" / "draftsmith" / "assets"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    """Make what is not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=str(ASSETS / "tiny-hybrid"))
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200, help="about, a conversation")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "target" / "config.json").exists():
        write_target(args.model, args.out / "target")
    write_chats(args.out / "chats.jsonl", args.conversations, args.tokens)


def write_target(model: str, out: Path) -> None:
    """Weights first: a folder with a config.json is whole."""
    config = config_of(model)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 2, 0, None  # the tokenizer's
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    target = random_target(config, device, torch.bfloat16)
    target.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    target.save_pretrained(aside, max_shard_size="4GB")
    for name in TOKENIZER:
        shutil.copy(ASSETS / "tiny-hybrid" / name, aside)
    aside.rename(out)
    print(f"{out}: {sum(p.numel() for p in target.parameters()):,} parameters", flush=True)


def filled_in(recipe: Path, out: Path) -> dict[str, Any]:
    """A recipe's configuration, its places below OUT."""
    config = yaml.safe_load(recipe.read_text())
    out = out.absolute()
    config["run"] = str(out / "run")
    config["target"] = {**config.get("target", {}), "model": str(out / "target")}
    config["prepare"]["sources"] = [{"path": str(out / "chats.jsonl")}]
    return config


def write_chats(path: Path, count: int, tokens: int) -> None:
    """Questions and answers of words from the built-in prompts, lengths spread about the mean."""
    draw = random.Random(0)
    prompts = (ASSETS / "demo-prompts.jsonl").read_text().splitlines()
    words = sorted(
        {
            word
            for line in prompts[:400]
            for word in json.loads(line)["messages"][0]["content"].split()
        }
    )
    a_word = 3.3  # tokens, measured
    lines = []
    for number in range(count):
        length = max(8, round(draw.uniform(0.4, 1.6) * tokens / a_word))
        said = draw.choices(words, k=length)
        question, answer = " ".join(said[: length // 3]), " ".join(said[length // 3 :])
        messages = [
            {"role": "user", "content": f"{number}. {question}"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
