"""Single-turn chats about Python functions, computed from their syntax trees.

Imported by prepare.py. Every task has several wordings; where the answer's form may differ, the
wording decides it, so that a greedy answer is a function of the prompt.
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from describe import FunctionNode, explain, list_facts

MAX_CODE_CHARS = 360

EXPLAIN = [
    ("Explain this function.", "The {noun} `{name}` takes {args}. It {body}.{end}"),
    ("Explain what this code does.", "This code defines `{name}` with {args}. It {body}.{end}"),
    ("What does this function do?", "`{name}` is a {noun} that takes {args}. It {body}.{end}"),
    ("Describe the function below.", "The {noun} `{name}` has {args}. First it {steps}.{end}"),
    ("Summarize this function.", "`{name}` takes {args} and {body}.{end}"),
    ("Can you explain this code?", "Yes. The {noun} `{name}` takes {args}, then {body}.{end}"),
]
FACTS = [
    "List the arguments and calls of this function.",
    "What are its arguments, and what does it call?",
    "Give the key facts of this function as a list.",
]
COMPLETE = [
    "Complete this function.",
    "Write the body of this function.",
    "Fill in the missing body.",
    "Implement this Python function.",
]
CONTINUE = [
    "Continue this code.",
    "What comes next in this function?",
    "Finish this function.",
    "Write the remaining lines.",
]
DOCSTRING = [
    "Write a one-line docstring for this function.",
    "What would be a good docstring here?",
    "Document this function in one sentence.",
]
WORDINGS: dict[str, list[str]] = {
    "explain": [wording for wording, _ in EXPLAIN],
    "facts": FACTS,
    "complete": COMPLETE,
    "continue": CONTINUE,
    "docstring": DOCSTRING,
}


@dataclass(frozen=True)
class Function:
    """A function cut into its parts; `body` has no docstring, all text is dedented."""

    node: FunctionNode
    header: str
    doc: str
    body: str

    @property
    def code(self) -> str:
        """The function without its docstring."""
        return f"{self.header}\n{self.body}"


@dataclass(frozen=True)
class Chat:
    """One prompt with its reference answer; `key` names its content whatever the wording."""

    source: str
    prompt: str
    answer: str
    key: str


def find_functions(text: str) -> Iterator[Function]:
    """Yield the functions of a file whose code is short enough for a prompt."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # deliberately broken test data
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, FunctionNode):
            continue
        end = node.end_lineno or node.lineno
        segment = textwrap.dedent("\n".join(lines[node.lineno - 1 : end])).split("\n")
        rest = list(node.body)
        header_end = rest[0].lineno - node.lineno
        doc = ast.get_docstring(node) or ""
        body_start = header_end
        if doc:
            body_start = (rest.pop(0).end_lineno or 0) - node.lineno + 1
        header, body = "\n".join(segment[:header_end]), "\n".join(segment[body_start:])
        body = body.strip("\n")
        if not rest or not header.rstrip().endswith(":") or not body.startswith(" "):
            continue
        if len(header) + len(body) <= MAX_CODE_CHARS and (header + body).isascii():
            yield Function(node, header, _first_sentence(doc), body)


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    return sentence if 12 <= len(sentence) <= 110 and sentence.isascii() else ""


def make_chats(function: Function, rng: random.Random) -> Iterator[Chat]:
    """Yield every chat that can be made of one function, in one random wording each."""
    template = rng.choice(EXPLAIN)
    yield _chat("explain", template[0], function.code, explain(function.node, template[1]))
    yield _chat("facts", rng.choice(FACTS), function.code, list_facts(function.node))
    lines = function.body.split("\n")
    if function.doc:
        yield _chat("docstring", rng.choice(DOCSTRING), function.code, function.doc)
        if len(lines) <= 6:
            head = f'{function.header}\n    """{function.doc}"""'
            yield _chat("complete", rng.choice(COMPLETE), head, _fence(function.body))
    if len(lines) >= 3:
        num_last = rng.randint(1, min(4, len(lines) - 2))
        head = "\n".join([function.header, *lines[:-num_last]])
        tail = "\n".join(lines[-num_last:])
        yield _chat("continue", rng.choice(CONTINUE), head, _fence(tail))


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _chat(source: str, wording: str, code: str, answer: str) -> Chat:
    key = source + ":" + re.sub(r"[\W\d_]+", "", code)
    return Chat(source, f"{wording}\n{_fence(code)}", answer, key)
