"""Forms of conversations other than OpenAI's messages: ShareGPT, Alpaca, and the exports of coding
agents; and which of them a record is.
"""

import json
from collections.abc import Callable
from typing import Any

from draftsmith.prepare.messages import Bad

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
TRACES = ("messages", "trajectory", "history", "fncall_messages")
KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning")


def guess(row: Any) -> str | None:
    """The form of a record, by its keys."""
    if not isinstance(row, dict):
        return None
    if "instruction" in row and "output" in row:  # which may have a 'history' too
        return "alpaca"
    if any(key in row for key in TRACES[1:]):
        return "traces"
    if "messages" in row:
        return "messages"
    return "sharegpt" if "conversations" in row else None


def converter(form: str) -> Callable[[Any], Any]:
    """The function that turns a record of this form into an OpenAI-style one. Raises Bad."""
    if form == "sharegpt":
        return _sharegpt
    if form == "alpaca":
        return _alpaca
    return _trace if form == "traces" else lambda row: row


def _sharegpt(row: Any) -> dict[str, Any]:
    turns = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns:
        wanted = '{"conversations": [{"from": ..., "value": ...}, ...]}'
        raise Bad("no messages", "no list 'conversations'", wanted)
    messages = [_sharegpt_message(i, turn) for i, turn in enumerate(turns)]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return {**_rest(row), "messages": messages}


def _sharegpt_message(i: int, turn: Any) -> dict[str, Any]:
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    value = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    if role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _sharegpt_calls(i, value)}
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        known = sorted([*SHAREGPT_ROLES, "function_call"])
        raise Bad("role", f"conversations[{i}] without a known 'from'", f"one of {known}")
    return {"role": SHAREGPT_ROLES[role], "content": value}


def _sharegpt_calls(i: int, value: Any) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        found = f"conversations[{i}], a function_call that is not JSON ({error})"
        raise Bad("tool calls", found, '{"name": ..., "arguments": ...}') from None
    return [
        {"type": "function", "function": c} for c in (calls if type(calls) is list else [calls])
    ]


def _alpaca(row: Any) -> dict[str, Any]:
    fields = {k: row.get(k) for k in ("instruction", "output")} if isinstance(row, dict) else {}
    if not fields or not all(isinstance(value, str) for value in fields.values()):
        raise Bad("no messages", "no texts 'instruction' and 'output'", "an Alpaca record")
    asked = str(fields["instruction"])
    if row.get("input"):
        asked += f"\n{row['input']}"
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    history = row.get("history") or []
    if not isinstance(history, (list, tuple)):
        raise Bad("no messages", "'history' of another form", "pairs of question and answer")
    for turn in history:
        if not isinstance(turn, (list, tuple)) or len(turn) != 2:
            raise Bad("no messages", "'history' of another form", "pairs of question and answer")
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    messages += [{"role": "user", "content": asked}]
    messages += [{"role": "assistant", "content": fields["output"]}]
    return {**_rest(row), "messages": messages}


def _trace(row: Any) -> dict[str, Any]:
    """A run of SWE-agent or OpenHands: its messages, through the agent's last word."""
    found = [row[key] for key in TRACES if row.get(key)] if isinstance(row, dict) else []
    steps = found[0] if found else None
    if isinstance(steps, str):
        try:
            steps = json.loads(steps)
        except (ValueError, RecursionError) as error:
            raise Bad("broken JSON", f"messages that are not JSON ({error})", "a list") from None
    if not isinstance(steps, list):
        raise Bad("no messages", f"none of the lists {', '.join(TRACES)}", "an agent's messages")
    messages = [_trace_message(step) for step in steps]
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant":
        messages.pop()
    return {**_rest(row), "messages": messages}


def _trace_message(step: Any) -> Any:
    if not isinstance(step, dict):
        return step
    out = {key: step[key] for key in KEPT if step.get(key) is not None}
    if out.get("role") == "ai":
        out["role"] = "assistant"
    for key in ("text", "system_prompt"):  # where SWE-agent's exports keep it
        if "content" not in out and isinstance(step.get(key), str):
            out["content"] = step[key]
    return out


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("tools", "source", "id") if row.get(key) is not None}
