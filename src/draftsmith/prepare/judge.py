"""What a worker does with a chunk of records: decode, convert, check, hash, and say which ones are
bad, odd or filtered. It keeps no memory of other chunks.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from draftsmith.config import SourceConfig
from draftsmith.prepare.clean import Suites, filtered, sketch
from draftsmith.prepare.formats import converter, guess
from draftsmith.prepare.messages import Bad, checked, oddities
from draftsmith.prepare.records import Chunk
from draftsmith.tables import SCRATCH

ASKED = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content")
"""What of a message makes it another one; ids and time stamps do not."""
DAMAGED_FILE = "damaged file"


@dataclass(frozen=True)
class Rules:
    """What a worker needs to know of the configuration."""

    sources: list[SourceConfig]
    seed: int
    keep_answers: bool
    suites: list[str]
    near_duplicates: bool
    max_line_bytes: int


@dataclass
class Judged:
    """A chunk's verdicts. Lists run over its good records, as the rows of `table` do."""

    source: int
    num_read: int
    bad: list[tuple[int, Bad]] = field(default_factory=list)
    odd: list[tuple[int, str]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    whole: list[bytes] = field(default_factory=list)  # digest of the whole conversation
    shares: list[float] = field(default_factory=list)  # place of the question in [0, 1): the split
    picks: list[float] = field(default_factory=list)  # an independent one, for the weight
    dropped: list[str | None] = field(default_factory=list)  # why it is left out on purpose
    ids: list[int | None] = field(default_factory=list)
    sketches: list[Any] = field(default_factory=list)
    table: Any = None


_rules: Rules
_suites: Suites


def setup(rules: Rules) -> None:
    """Once in each process."""
    global _rules, _suites
    _rules, _suites = rules, Suites(rules.suites)


def label(source: SourceConfig) -> str:
    """A source's name in reports."""
    return source.name or Path(source.path).name.split(".")[0]


def judge(chunk: Chunk) -> Judged:
    """All verdicts on a chunk."""
    out = Judged(chunk.source, len(chunk))
    convert = converter(chunk.form)
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(_records(chunk), start=chunk.first):
        try:
            if isinstance(record, (bytes, type(None))) and chunk.lines is not None:
                record = _decoded(record, number)
            elif isinstance(record, Bad):
                raise record
            rows.append(_good(checked(convert(record)), number, out))
        except Bad as bad:
            out.bad.append((number, bad))
        except RecursionError:
            out.bad.append((number, Bad("nesting", "values nested too deeply", "plainer ones")))
    if chunk.damage:
        number = chunk.first + len(chunk)
        out.bad.append((number, Bad(DAMAGED_FILE, chunk.damage, "a whole one")))
    out.table = pa.Table.from_pylist(rows, schema=SCRATCH)
    return out


def first_form(chunk: Chunk) -> str:
    """The form of the first record that has one; of lines that are all damaged: messages."""
    for number, record in enumerate(_records(chunk), start=chunk.first):
        try:
            form = guess(_decoded(record, number) if chunk.lines is not None else record)
        except Bad:
            continue
        if form:
            return form
    return "messages"


def _records(chunk: Chunk) -> list[Any]:
    if chunk.table is not None:
        return [_without_nulls(row) for row in _rows(chunk.table)]
    return chunk.lines if chunk.lines is not None else chunk.objects or []


def _rows(table: pa.Table) -> list[Any]:
    """The rows; in the place of one that Python cannot hold (text that is not UTF-8, a year 100,000) a
    Bad.
    """
    try:
        return table.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(table) > 1:
            return [row for i in range(len(table)) for row in _rows(table.slice(i, 1))]
        return [Bad("value", f"a value that cannot be read ({error})", "text and plain values")]


def _without_nulls(value: Any) -> Any:
    """Columns give every row the fields of all others, as nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _decoded(line: bytes | None, number: int) -> Any:
    if line is None:
        raise Bad("too long", "a longer line than prepare.max_line_bytes", "a shorter one")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise Bad("encoding", f"bytes that do not decode ({error})", "UTF-8 text") from None
    if not text.strip():
        raise Bad("empty line", "an empty line", "a JSON object")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"text that is not JSON ({error})"
        raise Bad("broken JSON", found, "a JSON object") from None


def _good(row: dict[str, Any], number: int, out: Judged) -> dict[str, Any]:
    source = _rules.sources[out.source]
    messages, answer = _split_answer(row["messages"])
    kept = {
        "origin": f"{out.source}:{number}",
        "source": source.name or row["source"] or label(source),
        "messages": _text(messages),
        "tools": _text(row["tools"]) if row["tools"] else None,
        "answer": _text(answer) if answer else None,
    }
    asked = json.dumps([[m.get(key) for key in ASKED] for m in messages], sort_keys=True)
    digest = hashlib.sha256(f"{_rules.seed}\0{asked}".encode())
    key = digest.digest()  # of the messages alone: a question is on one side whatever its tools
    said = [answer.get(key) for key in ASKED] if answer else None
    digest.update(json.dumps([row["tools"], said], sort_keys=True).encode())
    everything = [*messages, answer] if answer else messages
    reason = filtered(source.filters, everything)
    if reason is None and _suites.contain(everything):
        reason = "contaminated"
    out.numbers.append(number)
    out.whole.append(digest.digest()[:16])
    out.shares.append(int.from_bytes(key[:8], "big") / 2**64)
    out.picks.append(int.from_bytes(key[8:16], "big") / 2**64)
    out.dropped.append(reason)
    out.ids.append(_short_digest(row["id"]) if row["id"] is not None else None)
    if _rules.near_duplicates:
        out.sketches.append(sketch(messages))
    out.odd += [(number, kind) for kind in oddities(everything)]
    return kept


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"a lone surrogate, \\u{ord(text[error.start]):04x}, which is half a character"
        raise Bad("lone surrogate", found, "whole characters") from None
    return text


def _split_answer(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict | None]:
    """(prompt, final answer). A final answer is dropped when the target will write its own."""
    last = messages[-1]["role"]
    if last == "assistant":
        if not any(m["role"] == "user" for m in messages):
            found = "an answer without a question"
            raise Bad("no question", found, "a user message first")
        return messages[:-1], messages[-1] if _rules.keep_answers else None
    if _rules.keep_answers:
        found = f"a conversation that ends with role '{last}'"
        wanted = "an assistant's answer, since regenerate.enabled is false"
        raise Bad("no answer", found, wanted)
    return messages, None


def _short_digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
