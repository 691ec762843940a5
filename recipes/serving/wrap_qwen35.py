"""A Qwen3.5 text model in the multimodal wrapper, the only form of the family that vLLM registers.

    python recipes/serving/wrap_qwen35.py src/draftsmith/assets/tiny-hybrid runs/tiny-hybrid-vl

The text model's weights are copied as they are; the vision tower is tiny, random and never used
(serve with --language-model-only). `AutoModelForCausalLM` loads the result as the same text model.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)


def wrap(source: Path, out: Path) -> None:
    """Save `source` inside the wrapper under `out`, and check that its logits did not change."""
    text = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    size = text.config.hidden_size
    vision = {
        "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1,
        "out_hidden_size": size, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
    }  # fmt: skip
    special = text.config.vocab_size - 1  # a row without a token: no text contains it
    config = Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config=vision,
        tie_word_embeddings=text.config.tie_word_embeddings,
        **{
            f"{kind}_token_id": special for kind in ("image", "video", "vision_start", "vision_end")
        },
    )
    whole = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in ("generation_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(again(ids).logits, text(ids).logits), "the wrapped text model is the same"
    print(f"{out}: {sum(p.numel() for p in whole.parameters()):,} parameters with the unused tower")


if __name__ == "__main__":
    wrap(Path(sys.argv[1]), Path(sys.argv[2]))
