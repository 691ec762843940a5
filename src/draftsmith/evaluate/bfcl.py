"""Rows of the Berkeley Function Calling Leaderboard (single-turn categories) as a chat with tools."""

from typing import Any

TYPES = {
    name: kind
    for kind, names in {
        "object": ("dict", "HashMap", "Hashtable"),
        "array": ("list", "tuple", "Array", "ArrayList", "Queue", "Stack"),
        "string": ("any", "Any", "String", "char"),
        "boolean": ("bool", "Boolean"),
        "number": ("float", "double"),
        "integer": ("byte", "short", "long", "Bigint"),
    }.items()
    for name in names
}
"""JSON schema's name of a Python, Java or JavaScript type, as bfcl-eval gives them to chat APIs."""


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """{"messages", "tools", "category"} of {"id", "question", "function"}."""
    if "function" not in row:
        raise ValueError("a row without function: only BFCL's single-turn categories have it")
    tools = [{"type": "function", "function": json_schema(f)} for f in row["function"]]
    category = str(row["id"]).rsplit("_", 1)[0]
    return {"messages": row["question"][0], "tools": tools, "category": category}


def json_schema(node: Any) -> Any:
    """The same with JSON schema's type names."""
    if isinstance(node, list):
        return [json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: TYPES.get(value, value)
        if key == "type" and isinstance(value, str)
        else json_schema(value)
        for key, value in node.items()
    }
