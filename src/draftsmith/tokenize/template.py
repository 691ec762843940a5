"""The chat template: prompts as the server would render them, and what the target generates after
each of them.

Nothing is searched for in the text. An answer is what the chat rendered with it has more than the
prompt rendered without it, less what the template's own generation markers leave out.
"""

import os.path
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.core import UserError

MARKER = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Turn:
    """One answer in the text of a row. Character positions: the prompt ends at `start`, the answer
    at `end`; `marks` are the spans that the target generates. `message` is its place in the chat.
    """

    message: int
    start: int
    end: int
    marks: list[tuple[int, int]]


@dataclass(frozen=True)
class TextRow:
    """A chat as one text, and the supervised turns in it, in order."""

    text: str
    turns: list[Turn]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    *,
    where: str,
) -> list[int]:
    """Token ids up to where the target begins its answer. Raises UserError when the template
    refuses.
    """
    check_tools(tokenizer, tools, where)
    messages = as_served(tokenizer, messages, tools, template_kwargs, where=where)
    text, _ = _render(tokenizer, messages, tools, template_kwargs, where, prompt=True)
    return encode(tokenizer, text)


def as_served(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    *,
    where: str,
    answer: int | None = None,
) -> list[dict]:
    """The messages, without any reasoning where the prompt of `answer` (a place; None: the end)
    closes it before the target can begin one (`enable_thinking: false`): a target that is served so
    writes none in any turn.
    """
    if not any(m.get("reasoning_content") for m in messages):
        return messages
    args = (tools, template_kwargs, where)
    before = messages[:answer]
    prompt, _ = _render(tokenizer, before, *args, prompt=True)
    says = {"role": "assistant", "content": "-"}
    plain, _ = _render(tokenizer, [*before, says], *args, prompt=False)
    thinks = {**says, "reasoning_content": "-"}
    text, _ = _render(tokenizer, [*before, thinks], *args, prompt=False)
    if not plain.startswith(prompt) or text.startswith(prompt):
        return messages
    return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered text, which has its special tokens already."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def text_rows(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    answers: list[int],
    *,
    where: str,
) -> list[TextRow]:
    """The chat up to each of `answers` (places of assistant messages, ascending). Turns share a row
    as long as the template goes on from the text before; one that drops earlier reasoning, or adds a
    prefix to prompts alone, begins a new row.
    """
    check_tools(tokenizer, tools, where)
    args = (tools, template_kwargs, where)
    messages = as_served(
        tokenizer, messages, *args[:2], where=where, answer=min(answers, default=None)
    )
    rows: list[TextRow] = []
    for i in answers:
        prompt, _ = _render(tokenizer, messages[:i], *args, prompt=True)
        text, marks = _render(tokenizer, messages[: i + 1], *args, prompt=False)
        if not text.startswith(prompt):
            raise _no_prefix(where)
        spans = [(max(a, len(prompt)), b) for a, b in marks if b > len(prompt)]
        turn = Turn(i, len(prompt), len(text), spans)
        if rows and prompt.startswith(rows[-1].text):
            rows[-1] = TextRow(text, [*rows[-1].turns, turn])
        else:
            rows.append(TextRow(text, [turn]))
    return rows


def call_opening(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict] | None, template_kwargs: dict[str, Any]
) -> str | None:
    """What the template writes before the name of a called function, or None where it writes no
    calls: what two calls have more than one.
    """
    name = "zqxf"
    call = {"type": "function", "id": "c0", "function": {"name": name, "arguments": {}}}
    asked = {"role": "user", "content": "-"}
    texts = []
    for calls in ([call], [call, {**call, "id": "c1"}]):
        says = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text, _ = _render(
                tokenizer, [asked, says], tools, template_kwargs, "a call", prompt=False
            )
        except UserError:
            return None
        texts.append(text.split(name))
    one, two = texts
    if len(one) != 2 or len(two) != 3:
        return None
    rest = os.path.commonprefix([one[1], two[1]])  # what closes the first call
    return two[1][len(rest) :].strip() or None


def check_tools(tokenizer: PreTrainedTokenizerBase, tools: list[dict] | None, where: str) -> None:
    """Raise UserError for tools that the template would drop."""
    if tools and not re.search(r"\btools\b", _template_text(tokenizer)):
        raise UserError(
            where=where,
            found="tools, and a chat template that drops them without a word",
            expected="a template that renders tools",
            remedy="Give the target's folder a chat_template.jinja that does, or leave the tools out.",
        )


def _no_prefix(where: str) -> UserError:
    return UserError(
        where=where,
        found="a chat template whose finished chat does not begin with the prompt it answers",
        expected="the prompt's tokens as a prefix",
        remedy="Use regenerate.enabled: true, which keeps token ids and renders no answers.",
    )


def tokens_apart(
    tokenizer: Any, row: TextRow, eos: list[int], where: str
) -> list[tuple[list[int], list[int]]]:
    """(input_ids, loss_mask) of a row whose prompts and answers meet inside a token: each prompt is
    tokenized as the server would, the answer after it by itself.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for turn in row.turns:
        prompt = encode(tokenizer, row.text[: turn.start])
        answer = tokenizer(
            row.text[turn.start : turn.end], add_special_tokens=False, return_offsets_mapping=True
        )
        ids, offsets = answer["input_ids"], answer["offset_mapping"]
        if tokenizer.decode(prompt + ids) != tokenizer.decode(
            encode(tokenizer, row.text[: turn.end])
        ):
            raise _no_prefix(where)  # a tokenizer that adds a space to every text it is given
        marks = [(a - turn.start, b - turn.start) for a, b in turn.marks]
        mask = [int(any(a <= max(end - 1, 0) < b for a, b in marks)) for _, end in offsets]
        stop = next((k + 1 for k, token in enumerate(ids) if token in eos), len(ids))
        add_turn(rows, prompt, ids[:stop], mask[:stop])
    return rows


def add_turn(
    rows: list[tuple[list[int], list[int]]], prompt: list[int], ids: list[int], mask: list[int]
) -> None:
    """Append an answer to the last row when its prompt goes on from there, else begin a row."""
    before, seen = rows[-1] if rows else ([], [])
    if before and prompt[: len(before)] == before:
        rows[-1] = (prompt + ids, seen + [0] * (len(prompt) - len(before)) + mask)
    else:
        rows.append((prompt + ids, [0] * len(prompt) + mask))


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else " ".join(template.values())


def _render(
    tokenizer: Any,
    messages: list[dict],
    tools: list[dict] | None,
    template_kwargs: dict[str, Any],
    where: str,
    *,
    prompt: bool,
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the character spans that the template marks as generated (unmarked: all)."""
    template = tokenizer.get_chat_template(None, tools)
    marked = not prompt and MARKER.search(template) is not None
    if "developer" not in template:  # to such a template it is another word for system
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        texts, marks = render_jinja_template(
            [messages],
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marked,
            **{**tokenizer.special_tokens_map, **template_kwargs},
        )
    except TemplateSyntaxError as error:
        raise UserError(
            where="target.model",
            found=f"a chat template with an error in its line {error.lineno}: {error.message}",
            expected="a template that compiles",
            remedy="Mend chat_template.jinja in a local copy of the model.",
        ) from error
    except (
        TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(
            where=where,
            found=f"a conversation that the chat template refuses ({type(error).__name__}: {error})",
            expected="roles and fields the target's template knows",
            remedy="Mend or delete the conversation, or set tokenize.template_kwargs.",
        ) from error
    return texts[0], [(int(a), int(b)) for a, b in marks[0]] if marked else [(0, len(texts[0]))]
