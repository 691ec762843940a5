"""Three sources of prompts in three forms: tau2's tasks as messages with tools, WritingBench as Parquet,
the standard library's functions as Alpaca records.

    pip download --no-deps -d runs/downloads inspect-evals==0.28.0
    python recipes/data/prompts.py runs/downloads runs/mixed-data

inspect-evals is MIT (its NOTICE lists what tau2, MIT, and WritingBench, Apache-2.0, brought); the
standard library is under the PSF licence.
"""

import ast
import gzip
import json
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DOMAINS = ("airline", "retail")
AGENT = "You serve customers of an {domain} company. Look up what you need with the functions."


def tau2(wheel: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """What the customer of each task wants and is, and the functions that its domain's tasks call."""
    for domain in DOMAINS:
        tasks = json.loads(wheel.read(f"inspect_evals/tau2/data/domains/{domain}/tasks.json"))
        tools = _functions(tasks)
        for task in tasks:
            says = task["user_scenario"]["instructions"]
            asked = f"{says['reason_for_call']}\n\n{says['known_info'] or ''}".strip()
            messages = [
                {"role": "system", "content": AGENT.format(domain=domain)},
                {"role": "user", "content": asked},
            ]
            yield {"messages": messages, "tools": tools, "id": f"{domain}-{task['id']}"}


def _functions(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Schemas from the calls that tasks expect; the package has them only as Python code."""
    arguments: dict[str, dict[str, Any]] = {}
    for task in tasks:
        for action in task["evaluation_criteria"]["actions"] or []:
            known = arguments.setdefault(action["name"], {})
            known |= {name: {"type": _type(value)} for name, value in action["arguments"].items()}
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": known}},
        }
        for name, known in sorted(arguments.items())
    ]


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "string")


def writingbench(wheel: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """Long requests for texts, in Chinese and English."""
    for line in wheel.read("inspect_evals/writingbench/benchmark_all.jsonl").splitlines():
        row = json.loads(line)
        yield {"id": row["index"], "messages": [{"role": "user", "content": row["query"]}]}


def functions() -> Iterator[dict[str, Any]]:
    """Every function of the standard library that says what it does, with its code as the answer."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(errors="ignore")
        for node in ast.walk(ast.parse(text)):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if said and len(said) > 80:
                name = f"{path.stem}.{node.name}"
                asked = f"Write the Python function {name}, which its docstring describes."
                code = f"```python\n{ast.get_source_segment(text, node)}\n```"
                yield {"instruction": asked, "input": said, "output": code}


def main(downloads: Path, out: Path) -> None:
    """Write the three files."""
    wheel = zipfile.ZipFile(next(downloads.glob("inspect_evals-*.whl")))
    out.mkdir(parents=True, exist_ok=True)
    (out / "tau2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tau2(wheel)))
    pq.write_table(pa.Table.from_pylist(list(writingbench(wheel))), out / "writing.parquet")
    with gzip.open(out / "stdlib.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in functions())
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
