"""Readers: files of conversations -> plain dicts, each line checked, each fault named by file and line.

Messages come out as the server would see them: text parts joined, a tool call's JSON arguments as an
object, unknown fields left alone.
"""

import gzip
import json
import zlib
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
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                yield number, _checked(path, number, _decoded(path, number, line))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            _bad(path, number + 1, f"a damaged gzip file ({error})", "a whole one")
    if number == 0:
        raise UserError(
            where=f"{path}:1",
            found="an empty file",
            expected="one JSON object a line",
            remedy="Check the file, or leave it out of prepare.sources.",
        )


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        _bad(path, number, f"bytes that do not decode ({error})", "UTF-8 text")


def _checked(path: Path, number: int, text: str) -> dict[str, Any]:
    if not text.strip():
        _bad(path, number, "an empty line", "a JSON object")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        _bad(path, number, f"text that is not JSON ({error})", "a JSON object")
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        wanted = '{"messages": [{"role": ..., "content": ...}, ...]}'
        _bad(path, number, "no list 'messages'", wanted)
    tools = row.get("tools")
    if not isinstance(tools, (list, type(None))) or any(
        not isinstance(t, dict) for t in tools or []
    ):
        _bad(path, number, "'tools' that is not a list of objects", "a list of function schemas")
    source = row.get("source")
    if source is not None and not (isinstance(source, str) and source.isprintable()):
        _bad(path, number, f"'source' {source!r}", "a printable name")
    checked = [_message(path, number, i, message) for i, message in enumerate(messages)]
    return {"messages": checked, "tools": tools or None, "source": source}


def _message(path: Path, number: int, i: int, message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        _bad(path, number, f"messages[{i}] without a known role", f"a role of {sorted(ROLES)}")
    out = dict(message)
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            _bad(path, number, f"messages[{i}].content with a part that is not text", "text parts")
        out["content"] = "".join(str(part) for part in parts)
    elif not isinstance(content, str) and not (content is None and calls):
        kind = type(content).__name__
        _bad(path, number, f"messages[{i}].content of type {kind}", "text, or tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            wanted = '[{"function": {"name": ..., "arguments": ...}}, ...]'
            _bad(path, number, f"messages[{i}].tool_calls of another form", wanted)
        out["tool_calls"] = [_call(call) for call in calls]
    return out


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object: OpenAI sends JSON text, servers parse it before the template."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (
            ValueError
        ):  # the model may have written broken JSON; the template then gets the text
            return call
        if isinstance(parsed, dict):
            return {**call, "function": {**call["function"], "arguments": parsed}}
    return call


def _bad(path: Path, number: int, found: str, expected: str) -> NoReturn:
    raise UserError(
        where=f"{path}:{number}", found=found, expected=expected, remedy="Mend or delete the line."
    )
