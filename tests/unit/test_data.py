"""Conversations to tokens: duplicates, the split, templates and loss masks."""

import json

import pytest
from runs import contents, kill_when, write_config
from transformers import AutoTokenizer

from draftsmith import prepare, tables
from draftsmith import tokenize as tokenize_stage
from draftsmith.cli import main
from draftsmith.config import TokenizeConfig
from draftsmith.configfile import load
from draftsmith.core import UserError
from draftsmith.tokenize.rows import as_row, render_chat
from draftsmith.tokenize.template import render_prompt
from draftsmith.tokenize.work import _Part
from tiny_models import assets

EOS = [2]  # <|im_end|> of the tiny target


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(assets() / "tiny-hybrid")


def chat(question: str, answer: str | None = None, **more) -> dict:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, **more}


def prepared(tmp_path, rows: list[dict], **sections) -> list[dict]:
    path = write_config(tmp_path, **sections)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["prepare", str(path)]) == 0
    cfg = load(path)
    return list(tables.read_rows(prepare.folder(cfg), prepare.finished(cfg)))


def test_the_split_is_by_question_and_stable(tmp_path):
    rows = [chat(f"question {i}", f"answer {i}") for i in range(200)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = prepared(tmp_path, rows)
    share = sum(r["split"] == "held_out" for r in first) / len(first)
    assert 0.03 < share < 0.2
    side = {json.loads(r["messages"])[0]["content"]: r["split"] for r in first}
    more = [chat(f"another {i}") for i in range(50)] + [
        chat(f"question {i}", tools=tools) for i in range(200)
    ]
    again = prepared(tmp_path, more + rows[::-1])
    for row in again:
        question = json.loads(row["messages"])[0]["content"]
        assert side.get(question, row["split"]) == row["split"], "whatever stands beside it"
    assert [r["sample_id"] for r in again] == list(range(len(again)))


def test_exact_duplicates_go_and_answers_are_dropped_when_regenerated(tmp_path):
    rows = [chat("a", "1"), chat("a", "2"), chat("b", "1"), chat("b", "1"), chat("c")]
    assert len(prepared(tmp_path, rows)) == 3
    kept = prepared(tmp_path, rows[:4], regenerate={"enabled": False})
    assert [json.loads(r["answer"])["content"] for r in kept] == ["1", "2", "1"]


def test_caps_and_weights_choose_by_hash(tmp_path):
    rows = [chat(f"question {i}") for i in range(100)]
    few = prepared(tmp_path, rows, prepare={"max_samples": 10, "max_held_out": 2})
    assert sorted(r["split"] for r in few) == ["held_out"] * 2 + ["train"] * 10
    source = {"path": str(tmp_path / "prompts.jsonl"), "weight": 0.5}
    half = prepared(tmp_path, rows, prepare={"sources": [source]})
    assert 30 < len(half) < 70


def test_a_finished_chat_supervises_the_answer_and_its_end(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello <|im_end|> you"},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "Second  answer\n"},
    ]
    with_marks = render_chat(tokenizer, messages, None, {}, EOS, where="x")
    unmarked = AutoTokenizer.from_pretrained(assets() / "tiny-hybrid")
    template = unmarked.chat_template
    unmarked.chat_template = template.replace("{%- generation -%}", "").replace(
        "{%- endgeneration -%}", ""
    )
    for mark in (
        "{% generation %}",
        "{% endgeneration %}",
        "{%- generation %}",
        "{%- endgeneration %}",
    ):
        unmarked.chat_template = unmarked.chat_template.replace(mark, "")
    assert "generation %}" not in unmarked.chat_template.replace("add_generation_prompt %}", "")
    assert render_chat(unmarked, messages, None, {}, EOS, where="x") == with_marks, (
        "markers and differences agree"
    )
    ids, mask = with_marks
    supervised = [i for i, bit in zip(ids, mask, strict=True) if bit]
    assert tokenizer.decode(supervised) == "Second  answer\n<|im_end|>"
    assert ids[-1] == tokenizer.eos_token_id, "the newline after the turn is not the target's"
    prompt = render_prompt(tokenizer, messages[:-1], None, {}, where="x")
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])


def test_data_answers_can_be_trained_on_without_regenerating(tmp_path, tokenizer):
    rows = [chat(f"question {i}", f"the answer {i}") for i in range(20)]
    path = write_config(tmp_path, regenerate={"enabled": False})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["prepare", str(path)]) == 0 and main(["tokenize", str(path)]) == 0
    cfg = load(path)
    samples = tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg))
    texts = {
        tokenizer.decode([i for i, b in zip(s.input_ids, s.loss_mask, strict=True) if b])
        for s in samples
    }
    assert texts == {f"the answer {i}<|im_end|>" for i in range(20)}


def test_killed_the_next_run_gives_the_bytes_of_an_undisturbed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PART_ROWS", 200)
    rows = [chat(f"question {i}", "the answer " * 20) for i in range(2400)]
    sections = {"regenerate": {"enabled": False}, "tokenize": {"workers": 2}}
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    for folder in (tmp_path, undisturbed):
        prepared(folder, rows, **sections)
    tokens, path = tmp_path / "run/data/tokens", tmp_path / "config.yaml"
    parts = "part-*.parquet"
    kill_when(["tokenize", path], tmp_path / "run", "tokenize", lambda _: [*tokens.glob(parts)])
    made = {part.name: part.stat().st_mtime_ns for part in tokens.glob(parts)}
    assert 0 < len(made) < 12
    assert main(["tokenize", str(path)]) == 0
    assert main(["tokenize", str(undisturbed / "config.yaml")]) == 0
    assert contents(tokens) == contents(undisturbed / "run/data/tokens")
    assert (
        made.items() <= {part.name: part.stat().st_mtime_ns for part in tokens.glob(parts)}.items()
    )


def test_the_tokenizer_is_the_identity_on_text(tokenizer):
    for text in ("def f(x):\n\treturn  x\n", "naive cafe", "\u00e9\u4e2d\U0001f600", "  a   b\r\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_fields_that_are_no_part_of_the_question_do_not_split_it(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"question {i}", "id": f"{i}-{copy}"}]}
        for i in range(30)
        for copy in range(4)
    ]
    rows += [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": f"question {i}"}]}]}
        for i in range(30)
    ]
    assert len(prepared(tmp_path, rows)) == 30


def test_tool_calls_reach_the_template_as_a_server_would_pass_them(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    row = prepared(tmp_path, [{"messages": messages}, chat("other")])[0]
    assert json.loads(row["messages"])[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_a_template_whose_chat_does_not_begin_with_its_prompt_is_refused(tokenizer):
    odd = AutoTokenizer.from_pretrained(assets() / "tiny-hybrid")
    odd.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    messages = chat("question", "the answer")["messages"]
    with pytest.raises(UserError, match="does not begin with the prompt"):
        render_chat(odd, messages, None, {}, EOS, where="x")


def test_a_source_file_may_move(tmp_path):
    rows = [chat(f"question {i}") for i in range(10)]
    digests = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        prepared(tmp_path / name, rows)
        digests.append(prepare.finished(load(tmp_path / name / "config.yaml"))["digest"])
    assert digests[0] == digests[1]


def test_a_row_that_supervises_end_tokens_alone_is_counted_as_useless():
    """An answer of reasoning that the template drops leaves <|im_end|>: it would teach to say nothing."""
    part = _Part(TokenizeConfig(template_kwargs={}), eos=[2])
    about = {"sample_id": 7, "source": "a", "split": "train"}
    rows = [([5, 6, 2], [0, 0, 1]), ([5, 6, 2], [0, 1, 1]), ([5, 6], [0, 0])]
    part.add(about, [as_row(*row) for row in rows])
    assert part.counts["without_supervised_tokens"] == 2 and part.counts["train"] == 1
