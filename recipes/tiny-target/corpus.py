"""The tiny target's corpus: standard-library sources, their file-level split, the tokenizer.

Imported by prepare.py (see there for how to run); nothing is downloaded.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HELD_OUT_PERCENT = 22
MODEL_ROWS = 3072
TOKENIZER_LENGTH = 3064  # the last 8 embedding rows stay free (a drafter's mask token)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
# Tables, generated files and files that would carry a machine's paths.
SKIPPED = ("site-packages/", "encodings/cp", "encodings/iso", "encodings/mac_", "encodings/koi")
SKIPPED_NAMES = ("_sysconfigdata", "_vendor")
TEST_FOLDERS = {"test", "tests", "idle_test"}

# Words with an optional leading sign, numbers, signs, line breaks with the indentation's head.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- 'You may call these tools:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- 'To call one, answer <tool_call>{"name": ..., "arguments": ...}</tool_call>.' -}}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{{- message.content or '' -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set call = tool_call.function or tool_call -%}
{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>' -}}
{{- {'name': call.name, 'arguments': call.arguments} | tojson -}}
{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- elif not (message.role == 'system' and tools and loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class SourceFile:
    """One UTF-8 source file; `path` is relative to the standard library's folder."""

    path: str
    text: str
    is_test: bool
    held_out: bool


def is_held_out(path: str) -> bool:
    """Decide by the path alone, so that the split does not depend on what else is there."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def read_sources() -> list[SourceFile]:
    """Read every usable .py file of this interpreter's standard library, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path.startswith(SKIPPED) or any(name in path for name in SKIPPED_NAMES):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # test data in other encodings
        if not text.strip() or len(text) / (text.count("\n") + 1) > 100:
            continue  # empty, or generated tables
        is_test = bool(TEST_FOLDERS & set(path.split("/")))
        files.append(SourceFile(path, text, is_test, is_held_out(path)))
    return files


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE whose length is exactly TOKENIZER_LENGTH."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_LENGTH,
        special_tokens=[AddedToken(t, special=t.startswith("<|")) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
