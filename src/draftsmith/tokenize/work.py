"""What a worker does with a part: conversations, or the answers to them, -> one file of tokens."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith import tables
from draftsmith.config import TargetConfig, TokenizeConfig
from draftsmith.tokenize.rows import Chat, Row, as_row, places, tokenize_chats
from draftsmith.tokenize.template import add_turn

BATCH = 512  # chats tokenized together: with 64 the tokenizer takes a third longer
BATCH_CHARS = 1 << 21  # and no more text than this: an encoding takes some 100 bytes a token
ROW_STRIDE = 1 << 40
LISTED = 100  # useless or refused samples of a part that are named


@dataclass(frozen=True)
class Job:
    """One part. With `splits` and `names` (by row of `source`) it holds answers, else conversations."""

    source: Path
    out: Path
    splits: list[str] | None = None
    names: list[str] | None = None


@dataclass(frozen=True)
class Rules:
    """What a worker needs to know of the configuration."""

    target: TargetConfig
    tokenize: TokenizeConfig
    eos: list[int]
    paths: list[str]  # of the sources, for messages
    skip_refused: bool


_rules: Rules
_tokenizer: Any


def setup(rules: Rules) -> None:
    """Once in each process."""
    from transformers import AutoTokenizer

    global _rules, _tokenizer
    _rules = rules
    _tokenizer = AutoTokenizer.from_pretrained(rules.target.model, revision=rules.target.revision)


def tokenize_part(job: Job) -> int:
    """Write a part of tokens, with its counts in the file's metadata; how many chats it came from."""
    part = _Part(_rules.tokenize, _rules.eos)
    number = 0
    for meta, rows in _answers(job) if job.splits is not None else _chats(job, part):
        number += 1
        part.add(meta, rows)
    tables.write_arrow(job.out, part.table())
    return number


def counts_of(path: Path) -> dict[str, Any]:
    """The counts of a part of tokens that was written before."""
    return json.loads(pq.read_schema(path).metadata[b"draftsmith"])


class _Part:
    """The rows of a part of tokens, as they come."""

    def __init__(self, cfg: TokenizeConfig, eos: list[int]) -> None:
        self.cfg, self.eos = cfg, eos
        self.counts: Counter[str] = Counter()
        self.useless: list[int] = []
        self.refused: list[str] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in tables.TOKENS.names}

    def add(self, meta: dict[str, Any], rows: list[Row]) -> None:
        """A chat's rows, within the longest length."""
        for number, (ids, mask) in enumerate(rows):
            if len(ids) > self.cfg.max_length_tokens:
                self.counts["too_long"] += 1
                if self.cfg.too_long == "drop":
                    continue
                ids, mask = (x[: self.cfg.max_length_tokens] for x in (ids, mask))
                if self.cfg.too_long == "split":
                    ids, mask = _whole_turns(ids, mask, rows[number][1])
            supervised = int(mask.sum())
            # nothing, or end tokens alone: more than a few would be a conversation of empty answers
            if supervised < 8 and np.isin(ids[mask.astype(bool)], self.eos).all():
                self.counts["without_supervised_tokens"] += 1
                self.useless.append(meta["sample_id"])
                continue
            self.counts[meta["split"]] += 1
            self.counts["tokens"] += len(ids)
            self.counts["supervised_tokens"] += supervised
            row = {**meta, "sample_id": meta["sample_id"] + number * ROW_STRIDE}
            row |= {"input_ids": ids, "loss_mask": mask}
            for name, column in self._columns.items():
                column.append(row[name])

    def table(self) -> pa.Table:
        """All rows."""
        arrays = []
        for name, column in self._columns.items():
            if name in ("input_ids", "loss_mask"):
                offsets = np.cumsum([0, *map(len, column)], dtype=np.int32)
                kind = np.int32 if name == "input_ids" else np.uint8
                values = np.concatenate(column) if column else np.array([], kind)
                arrays.append(pa.ListArray.from_arrays(offsets, values))
            else:
                arrays.append(pa.array(column, tables.TOKENS.field(name).type))
        said = {
            **self.counts,
            "listed_without_supervised_tokens": self.useless[:LISTED],
            "listed_refused": self.refused[:LISTED],
        }
        if self.refused:
            said["refused_by_template"] = len(self.refused)
        schema = tables.TOKENS.with_metadata({"draftsmith": json.dumps(said)})
        return pa.Table.from_arrays(arrays, schema=schema)


def _whole_turns(ids: np.ndarray, mask: np.ndarray, full: np.ndarray) -> Row:
    """A cut row without the turn that the cut went through."""
    end = len(mask)
    if full[end - 1] and full[end]:
        while end and mask[end - 1]:
            end -= 1
    while end and not mask[end - 1]:
        end -= 1  # what follows the last whole turn teaches nothing
    return ids[:end], mask[:end]


def _answers(job: Job) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Answers keep the ids they were written in; a conversation's turns stand one after another."""
    assert job.splits is not None and job.names is not None
    sample: int | None = None
    rows: list[tuple[list[int], list[int]]] = []
    kept = zip(_rows(job.source), job.splits, job.names, strict=True)
    meta: dict[str, Any] = {}
    for row, split, name in kept:
        if sample is not None and row["sample_id"] != sample:
            yield meta, [as_row(*row) for row in rows]
            rows = []
        sample = row["sample_id"]
        meta = {"sample_id": sample, "source": name, "split": split}
        add_turn(rows, row["prompt_ids"], row["answer_ids"], [1] * len(row["answer_ids"]))
    if rows:
        yield meta, [as_row(*row) for row in rows]


def _chats(job: Job, part: _Part) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    waiting: list[dict[str, Any]] = []
    chars = 0
    for row in _rows(job.source):
        waiting.append(row)
        chars += len(row["messages"]) + len(row["answer"])
        if len(waiting) == BATCH or chars > BATCH_CHARS:
            yield from zip(waiting, _tokenized(waiting, part), strict=True)
            waiting, chars = [], 0
    yield from zip(waiting, _tokenized(waiting, part), strict=True)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for batch in tables.batches(path, 512):
        yield from batch.to_pylist()


def _tokenized(rows: list[dict[str, Any]], part: _Part) -> list[list[Row]]:
    chats = []
    for row in rows:
        index, _, number = row["origin"].partition(":")
        messages = [*json.loads(row["messages"]), json.loads(row["answer"])]
        tools = json.loads(row["tools"]) if row["tools"] else None
        where = f"{_rules.paths[int(index)]}:{number}"
        chats.append(Chat(messages, tools, places(messages, _rules.tokenize.turns), where))
    refused = part.refused if _rules.skip_refused else None
    kwargs = _rules.tokenize.template_kwargs
    made = tokenize_chats(_tokenizer, chats, kwargs, _rules.eos, refused)
    if _rules.tokenize.too_long == "split":
        for i, rows_made in enumerate(made):
            if any(len(ids) > _rules.tokenize.max_length_tokens for ids, _ in rows_made):
                part.counts["split"] += 1
                made[i] = _split(chats[i], part)
    return made


def _split(chat: Chat, part: _Part) -> list[Row]:
    """Pieces of a long chat that fit: each a run of its turns, from a user's message on, under the
    system message. An answer that does not fit with its own question is left to be cut.
    """
    most = _rules.tokenize.max_length_tokens
    head = [m for m in chat.messages[:1] if m["role"] in ("system", "developer")]
    users = [i for i, m in enumerate(chat.messages) if m["role"] == "user"] or [len(head)]
    out: list[Row] = []
    answers = chat.answers
    begin = len(head)
    while answers:
        ends = [answers[: n + 1] for n in range(len(answers))]
        fitting: list[Row] = []
        taken = 0
        for tried in ends:
            rows = _piece(chat, head, begin, tried)
            if any(len(ids) > most for ids, _ in rows):
                break
            fitting, taken = rows, len(tried)
        latest = max((u for u in users if u < answers[0]), default=begin)
        if not taken and begin < latest:
            begin = latest  # less of what came before
            continue
        out += fitting or _piece(chat, head, begin, answers[:1])
        answers = answers[max(taken, 1) :]
        if answers:
            begin = max((u for u in users if u < answers[0]), default=begin)
    return out


def _piece(chat: Chat, head: list[dict], begin: int, answers: list[int]) -> list[Row]:
    shift = len(head) - begin
    messages = head + chat.messages[begin : answers[-1] + 1]
    piece = Chat(messages, chat.tools, [i + shift for i in answers], chat.where)
    return tokenize_chats(_tokenizer, [piece], _rules.tokenize.template_kwargs, _rules.eos)[0]
