"""The tiny target's demo prompts with answers that are not its own: computed from the source that each prompt
shows a part of, as its training chats were from other files.

    python recipes/quality/off_policy.py RUN OUT.jsonl
    draftsmith run RUN/run.yaml --run runs/off --prepare.sources "[{path: OUT.jsonl}]" \\
        --prepare.held_out 0.01 --regenerate.enabled false ...
    python recipes/quality/table.py RUN --drafter off-policy=runs/off/checkpoints/step-N

RUN gives the prompts: those that it trains on, so that answers are all that differs.
"""

import json
import sys
from pathlib import Path

from draftsmith import configfile
from draftsmith import tokenize as tokenize_stage
from draftsmith.target.load import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny-target"))

from corpus import read_sources  # noqa: E402
from prepare import SEED, collect_chats  # noqa: E402


def main(run: Path, out: Path) -> None:
    """One line a training sample of RUN."""
    held_out = [file for file in read_sources() if file.held_out]
    chats = collect_chats(held_out, num_rounds=1, seed=SEED)
    answers = {chat.prompt.strip(): chat.answer for chat in chats}
    cfg = configfile.load(run / "run.yaml", {"run": str(run)})
    tokenizer = load_tokenizer(cfg.target)
    lines, missing = [], 0
    for sample in tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg)):
        if sample.split != "train":
            continue
        first = sample.loss_mask.index(1)
        said = tokenizer.decode(sample.input_ids[:first])
        prompt = said.split("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0].strip()
        if prompt not in answers:
            missing += 1
            continue
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answers[prompt]},
        ]
        lines.append(json.dumps({"messages": messages}))
    out.write_text("\n".join(lines) + "\n")
    print(
        f"{out}: {len(lines)} conversations; {missing} prompts of this Python's library not found"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
