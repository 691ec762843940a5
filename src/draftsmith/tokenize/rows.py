"""Rendered chats -> token ids and loss masks, many at a time.

A row's text is tokenized once. Where a prompt and its answer meet between two tokens, the ids are
those of the prompt as served plus those that the target would generate; where they meet inside a
token (a prompt that ends in a newline, an answer that begins with one), each is tokenized by itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.core import UserError
from draftsmith.tokenize.template import TextRow, text_rows, tokens_apart

Row = tuple[np.ndarray, np.ndarray]
"""input_ids int32 [n] and loss_mask uint8 [n]."""


@dataclass(frozen=True)
class Chat:
    """A finished chat; `answers` are the places of the assistant messages to supervise."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answers: list[int]
    where: str


def places(messages: list[dict[str, Any]], turns: str) -> list[int]:
    """Which messages are supervised: all answers, or the last."""
    found = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return found if turns == "all" else found[-1:]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    eos: list[int],
    *,
    where: str,
) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of a chat that ends with an assistant's answer; only that answer is
    supervised, through the token that ends its turn (one of `eos`).
    """
    chat = Chat(messages, tools, [len(messages) - 1], where)
    ids, mask = tokenize_chats(tokenizer, [chat], template_kwargs, eos)[0][0]
    return ids.tolist(), mask.tolist()


def tokenize_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    template_kwargs: dict[str, Any],
    eos: list[int],
    refused: list[str] | None = None,
) -> list[list[Row]]:
    """The rows of each chat. One that the template refuses is a UserError, or, with a list
    `refused`, has no rows and its fault is added there.
    """
    texts = []
    for chat in chats:
        try:
            args = (tokenizer, chat.messages, chat.tools, template_kwargs, chat.answers)
            texts.append(text_rows(*args, where=chat.where))
        except UserError as error:
            if refused is None:
                raise
            refused.append(str(error))
            texts.append([])
    flat = [row for rows in texts for row in rows]
    encodings = iter(_encode(tokenizer, [row.text for row in flat]))
    out = []
    for chat, rows in zip(chats, texts, strict=True):
        mine: list[Row] = []
        for row in rows:
            encoding = next(encodings)
            whole = _tokens(encoding, row, eos) if encoding is not None else None
            apart = [] if whole else tokens_apart(tokenizer, row, eos, chat.where)
            mine += [whole] if whole else [as_row(*lists) for lists in apart]
        out.append(mine)
    return out


def as_row(ids: list[int], mask: list[int]) -> Row:
    """Lists as a row."""
    return np.array(ids, np.int32), np.array(mask, np.uint8)


def _encode(tokenizer: Any, texts: list[str]) -> list[Any]:
    if not tokenizer.is_fast:
        return [None] * len(texts)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend.encode_batch(texts, add_special_tokens=False)


def _tokens(encoding: Any, row: TextRow, eos: list[int]) -> Row | None:
    """The row's tokens, or None where a turn begins inside a token."""
    ids = np.array(encoding.ids, np.int32)
    ends = ids == eos[0]
    for token in eos[1:]:
        ends |= ids == token
    mask = np.zeros(len(ids), np.uint8)
    stop = len(ids)
    for turn in row.turns:
        first = _token_at(encoding, turn.start)
        if first is None:
            return None
        end = len(ids) if turn.end == len(row.text) else _token_at(encoding, turn.end)
        if end is None:
            return None
        ended = np.flatnonzero(ends[first:end])
        stop = first + int(ended[0]) + 1 if len(ended) else end
        for start, after in turn.marks:
            left = first if start == turn.start else encoding.char_to_token(start)
            right = end - 1 if after == turn.end else encoding.char_to_token(after - 1)
            if left is None or right is None:
                return None
            mask[left : min(right + 1, stop)] = 1
    return ids[:stop], mask[:stop]


def _token_at(encoding: Any, at: int) -> int | None:
    """The token that begins at this character, if one does."""
    found = encoding.char_to_token(at)
    if found is None:  # a token's leading space is no part of its span
        found = encoding.char_to_token(at + 1)
    if not found:
        return None
    return found if encoding.token_to_chars(found - 1)[1] == at else None
