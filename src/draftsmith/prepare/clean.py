"""What is left out on purpose: filters, near duplicates, and conversations that share text with an
evaluation suite.
"""

import hashlib
import importlib
import json
import re
from pathlib import Path
from typing import Any

from draftsmith.config import FiltersConfig, SourceConfig
from draftsmith.core import UserError
from draftsmith.prepare.formats import converter, guess
from draftsmith.prepare.messages import Bad, checked
from draftsmith.prepare.records import read_chunks

NGRAM = 13  # words in a row, as in the GPT-3 report
BOILERPLATE = 10  # a run of words in more prompts of a suite than this is its form, not its content
PERMUTATIONS = 128
SHINGLE = 3  # words
WORD = re.compile(r"\w+")


def texts(messages: list[dict[str, Any]]) -> list[str]:
    """Everything that is said in a conversation."""
    out = []
    for message in messages:
        out += [message[key] for key in ("reasoning_content", "content") if message.get(key)]
        out += [json.dumps(call["function"]) for call in message.get("tool_calls") or []]
    return out


def filtered(filters: FiltersConfig, messages: list[dict[str, Any]]) -> str | None:
    """Why these filters leave the conversation out, or None."""
    if len(messages) < filters.min_messages:
        return "fewer than min_messages"
    if filters.max_messages is not None and len(messages) > filters.max_messages:
        return "more than max_messages"
    said = texts(messages)
    chars = sum(map(len, said))
    if chars < filters.min_chars:
        return "fewer than min_chars"
    if filters.max_chars is not None and chars > filters.max_chars:
        return "more than max_chars"
    if filters.match and not any(re.search(filters.match, text) for text in said):
        return "without match"
    if filters.match_none and any(re.search(filters.match_none, text) for text in said):
        return "with match_none"
    return None


def _grams(text: str) -> set[bytes]:
    """Digests of every run of NGRAM words; of the whole text when it has fewer."""
    words = WORD.findall(text.lower())
    last = max(len(words) - NGRAM, 0)
    runs = (" ".join(words[i : i + NGRAM]) for i in range(last + 1))
    return {hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs if run}


class Suites:
    """The evaluation prompts that training must not have seen."""

    def __init__(self, paths: list[str]) -> None:
        self._grams: set[bytes] = set()
        for path in paths:
            self._grams |= _suite_grams(path)

    def contain(self, messages: list[dict[str, Any]]) -> bool:
        """Whether a message shares NGRAM words in a row with a prompt (or is a shorter one)."""
        if not self._grams:
            return False
        return any(not self._grams.isdisjoint(_grams(text)) for text in texts(messages))


def _suite_grams(path: str) -> set[bytes]:
    if not Path(path).is_file():
        raise UserError(
            where=f"prepare.decontaminate: {path}",
            found="no such file",
            expected="a file of evaluation prompts",
            remedy="Check the path.",
        )
    counts: dict[bytes, int] = {}
    for chunk in read_chunks(SourceConfig(path=path), 0, 1 << 26):
        if chunk.damage:
            _bad_suite(path, chunk.first + len(chunk), chunk.damage)
        rows = chunk.objects or (chunk.table.to_pylist() if chunk.table else None)
        for i, row in enumerate(rows if rows is not None else chunk.lines or []):
            for gram in _prompt_grams(path, chunk.first + i, row):
                counts[gram] = counts.get(gram, 0) + 1
    return {gram for gram, count in counts.items() if count <= BOILERPLATE}


def _prompt_grams(path: str, number: int, row: Any) -> set[bytes]:
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            _bad_suite(path, number, f"text that is not JSON ({error})")
    found = _prompts(row)
    if not found:
        _bad_suite(path, number, "no prompt")
    return set().union(*(_grams(prompt) for prompt in found))


def _bad_suite(path: str, number: int, found: str) -> None:
    raise UserError(
        where=f"{path}:{number}",
        found=found,
        expected="conversations, or texts named prompt, question, text or turns",
        remedy="Mend the file, or leave it out of prepare.decontaminate.",
    )


def _prompts(row: Any) -> list[str]:
    """The texts of a record that a model would be asked."""
    if not isinstance(row, dict):
        return []
    form = guess(row)
    if form is not None:
        try:
            messages = checked(converter(form)(row))["messages"]
        except Bad:
            return []
        return [m["content"] for m in messages if m["role"] == "user" and m["content"]]
    found = [row.get(key) for key in ("prompt", "question", "text", "turns")]
    return [text for value in found for text in _strings(value)]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _strings(value.get("content"))
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []


def sketch(messages: list[dict[str, Any]]) -> Any:
    """MinHash of the users' words (runs of three)."""
    words = WORD.findall(" ".join(m["content"] or "" for m in messages if m["role"] == "user"))
    runs = [" ".join(words[i : i + SHINGLE]) for i in range(max(len(words) - SHINGLE, 0) + 1)]
    out = _rensa().RMinHash(num_perm=PERMUTATIONS, seed=42)
    out.update(runs)
    return out


def _rensa() -> Any:
    try:
        return importlib.import_module("rensa")  # compiled, and without type stubs
    except ImportError:
        raise UserError(
            where="prepare.near_duplicates",
            found="no `rensa` library",
            expected="it, for MinHash",
            remedy="pip install 'draftsmith[dedup]', or leave prepare.near_duplicates out.",
        ) from None


class NearDuplicates:
    """Questions seen so far, by MinHash."""

    def __init__(self, threshold: float) -> None:
        self._seen = _rensa().RMinHashDeduplicator(
            threshold=threshold, num_perm=PERMUTATIONS, use_lsh=True, num_bands=32
        )
        self._count = 0

    def add(self, sketched: Any) -> bool:
        """Whether this question is new."""
        self._count += 1
        return self._seen.add(str(self._count), sketched)
