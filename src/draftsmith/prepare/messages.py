"""One conversation, checked: messages come out as the server would see them. Text parts are joined, a
tool call's JSON arguments become an object, unknown fields are left alone.
"""

import json
from typing import Any

ROLES = {"system", "developer", "user", "assistant", "tool"}


class Bad(Exception):
    """A record that cannot be used: `kind` is for counting, the rest for people."""

    def __init__(self, kind: str, found: str, expected: str) -> None:
        super().__init__(kind, found, expected)
        self.kind, self.found, self.expected = kind, found, expected


def checked(row: Any) -> dict[str, Any]:
    """{"messages", "tools", "source", "id"} of an OpenAI-style record. Raises Bad."""
    messages = _parsed(row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        wanted = '{"messages": [{"role": ..., "content": ...}, ...]}'
        has = f"keys {sorted(map(str, row))[:12]}" if isinstance(row, dict) else type(row).__name__
        raise Bad("no messages", f"no list 'messages' ({has})", wanted)
    tools = _parsed(row.get("tools") or None)
    if not isinstance(tools, (list, type(None))) or any(
        not isinstance(t, dict) for t in tools or []
    ):
        raise Bad("tools", "'tools' that is not a list of objects", "a list of function schemas")
    source = row.get("source")
    if source is not None and not (isinstance(source, str) and source.isprintable()):
        raise Bad("source", f"'source' {source!r}", "a printable name")
    return {
        "messages": [_message(i, message) for i, message in enumerate(messages)],
        "tools": tools or None,
        "source": source,
        "id": row.get("id"),
    }


def _parsed(value: Any) -> Any:
    """Data sets keep nested values as JSON text, since columns have one type."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _message(i: int, message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise Bad("role", f"messages[{i}] of role {role!r}", f"a role of {sorted(ROLES)}")
    out = dict(message)
    calls = message.get("tool_calls")
    out["content"] = _content(i, message.get("content"), calls=bool(calls))
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if not isinstance(reasoning, (str, type(None))):
        kind = type(reasoning).__name__
        raise Bad("reasoning", f"messages[{i}].reasoning_content of type {kind}", "text")
    if reasoning is not None:
        out["reasoning_content"] = reasoning
        out.pop("reasoning", None)
    if calls is not None:
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            wanted = '[{"function": {"name": ..., "arguments": ...}}, ...]'
            raise Bad("tool calls", f"messages[{i}].tool_calls of another form", wanted)
        out["tool_calls"] = [_call(call) for call in calls]
    says = (out["content"] or "").strip() or calls or (reasoning or "").strip()
    if role in ("user", "assistant") and not says:
        raise Bad("empty content", f"messages[{i}] ({role}) without a word", "text, or tool_calls")
    return out


def _content(i: int, content: Any, *, calls: bool) -> str | None:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            found = f"messages[{i}].content with a part that is not text"
            raise Bad("content", found, "text parts")
        return "".join(str(part) for part in parts)
    if not isinstance(content, str) and not (content is None and calls):
        kind = type(content).__name__
        raise Bad("content", f"messages[{i}].content of type {kind}", "text, or tool_calls")
    return content


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object: OpenAI sends JSON text, servers parse it before the template."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call  # the model may have written broken JSON; the template then gets the text
        if isinstance(parsed, dict):
            return {**call, "function": {**call["function"], "arguments": parsed}}
    return call


def oddities(messages: list[dict[str, Any]]) -> list[str]:
    """What is unusual in a good conversation, and may be a sign of damage: it is counted and kept."""
    calls = [call for m in messages for call in m.get("tool_calls") or []]
    ids = [call.get("id") for call in calls]
    odd = []
    if any(not isinstance(i, str) or not i for i in ids):
        odd.append("tool calls without ids")
    if any(not isinstance(call["function"].get("arguments", {}), dict) for call in calls):
        odd.append("tool calls whose arguments are no JSON object")
    named = [str(i) for i in ids if i]
    if len(set(named)) < len(named):
        odd.append("tool calls that share an id")
    return odd
