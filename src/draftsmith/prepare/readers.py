"""Readers: files of conversations -> plain dicts, each line checked, each fault named by file and
line.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from draftsmith.core import UserError

ROLES = {"system", "developer", "user", "assistant", "tool"}


def read_messages(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, {"messages", "tools", "source"}) of every line of an OpenAI-style JSONL file,
    plain or .gz.
    """
    if not path.is_file():
        raise UserError(
            where=f"prepare.sources: {path}",
            found="no such file",
            expected="a JSONL file of conversations",
            remedy="Check the path.",
        )
    open_text = gzip.open if path.suffix == ".gz" else open
    number = 0
    with open_text(path, "rt", encoding="utf-8", errors="strict") as file:
        try:
            for number, text in enumerate(file, start=1):
                yield number, _checked(path, number, text)
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            _bad(path, number + 1, f"bytes that do not decode ({error})", "UTF-8 text")
    if number == 0:
        raise UserError(
            where=f"{path}:1",
            found="an empty file",
            expected="one JSON object a line",
            remedy="Check the file, or leave it out of prepare.sources.",
        )


def _checked(path: Path, number: int, text: str) -> dict[str, Any]:
    if not text.strip():
        _bad(path, number, "an empty line", "a JSON object")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        _bad(path, number, f"text that is not JSON ({error})", "a JSON object")
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("messages"), list)
        or not row["messages"]
    ):
        _bad(
            path, number, "no list 'messages'", '{"messages": [{"role": ..., "content": ...}, ...]}'
        )
    for i, message in enumerate(row["messages"]):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            _bad(path, number, f"messages[{i}] without a known role", f"a role of {sorted(ROLES)}")
        content = message.get("content")
        if not (
            isinstance(content, (str, list)) or (content is None and message.get("tool_calls"))
        ):
            _bad(
                path,
                number,
                f"messages[{i}].content of type {type(content).__name__}",
                "text, or tool_calls",
            )
    tools = row.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        _bad(path, number, "'tools' that is not a list of objects", "a list of function schemas")
    return row


def _bad(path: Path, number: int, found: str, expected: str) -> NoReturn:
    raise UserError(
        where=f"{path}:{number}", found=found, expected=expected, remedy="Mend or delete the line."
    )
