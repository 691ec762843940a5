"""The regenerate stage: the target answers every prompt itself, in process or through servers. A
drafter learns what the target would say, not what somebody else said.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith import manifest as manifests
from draftsmith import prepare, tables
from draftsmith.config import RunConfig
from draftsmith.core import StageResult, UserError
from draftsmith.files import file_digest
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.regenerate import inprocess, servers
from draftsmith.regenerate.journal import NAME as JOURNAL
from draftsmith.regenerate.servers import Conversation
from draftsmith.target.load import (
    check_ids,
    inspect_target,
    load_tokenizer,
    tokenizer_digest,
)
from draftsmith.tokenize.template import render_prompt


def folder(cfg: RunConfig) -> Path:
    """Where answers go."""
    return cfg.root / "data" / "answers"


def run(cfg: RunConfig) -> StageResult:
    """Answer all prompts of both splits."""
    out = folder(cfg)
    conversations = prepare.finished(cfg)
    sizes = f"regenerate.batch_size {cfg.regenerate.batch_size}"
    with stage_report(cfg.root, "regenerate", sizes) as report:
        tokenizer = load_tokenizer(cfg.target)
        manifest = manifests.begin(
            out, "answers/2", _inputs(cfg, conversations, tokenizer), remake=False
        )
        if manifest["complete"]:
            return StageResult("regenerate", str(out), skipped=True, summary=manifest["counts"])
        answer = _by_servers if cfg.regenerate.by_server else _in_process
        names, more = answer(cfg, conversations, tokenizer, out, report)
        entries = {name: _entry(out / name) for name in names}
        counts = {**_counts([out / name for name in names if name.endswith(".parquet")]), **more}
        manifest = manifests.finish(out, manifest, entries, counts)
        (out / JOURNAL).unlink(missing_ok=True)
    return StageResult("regenerate", str(out), summary=manifest["counts"])


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete output for this configuration, or a UserError."""
    inputs = _inputs(cfg, prepare.finished(cfg), load_tokenizer(cfg.target))
    return manifests.required(folder(cfg), "regenerate", inputs)


def _inputs(cfg: RunConfig, conversations: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    asked = cfg.regenerate
    names = {"max_new_tokens", "temperature", "loop_ngram", "answers_per_file"}
    if asked.temperature:
        names |= {"top_p", "top_k"}
    return {
        "conversations": conversations["digest"],
        "target": inspect_target(cfg.target).identity(),
        "dtype": cfg.target.dtype,
        "tokenizer": tokenizer_digest(tokenizer),
        **asked.model_dump(include=names if asked.by_server else {*names, "batch_size"}),
        "by": "servers" if asked.by_server else "this process",
        "turns": cfg.tokenize.turns,
        "max_length_tokens": cfg.tokenize.max_length_tokens,
        "template_kwargs": cfg.tokenize.template_kwargs,
    }


def _counts(files: list[Path]) -> dict[str, int]:
    """Answers, their tokens, and how many ended for which reason."""
    ends: Counter[str] = Counter()
    tokens = 0
    for path in files:
        ends.update(tables.read_column(path, "stop_reason"))
        tokens += sum(map(len, tables.read_column(path, "answer_ids")))
    return {"answers": ends.total(), "answer_tokens": tokens, **ends}


def _entry(path: Path) -> dict[str, Any]:
    if path.suffix == ".parquet":
        return tables.entry(path)
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}


def _conversations(cfg: RunConfig, manifest: dict[str, Any]) -> Iterator[Conversation]:
    """Every conversation, and where in it the target is to answer."""
    for row in tables.read_rows(prepare.folder(cfg), manifest):
        messages = json.loads(row["messages"])
        turns = [len(messages)]
        if cfg.tokenize.turns == "all":
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"] + turns
        tools = json.loads(row["tools"]) if row["tools"] else None
        where = prepare.place(cfg, row)
        yield Conversation(row["sample_id"], row["split"], messages, tools, turns, where)


def _prompt(
    cfg: RunConfig, tokenizer: Any, messages: list[dict], tools: list[dict] | None, where: str
) -> list[int]:
    """A prompt's token ids, all of which the target knows."""
    ids = render_prompt(tokenizer, messages, tools, cfg.tokenize.template_kwargs, where=where)
    check_ids(max(ids), inspect_target(cfg.target), where)
    return ids


def _in_process(
    cfg: RunConfig,
    manifest: dict[str, Any],
    tokenizer: Any,
    out: Path,
    report: StageReport,
) -> tuple[list[str], dict[str, int]]:
    prompts: dict[int, inprocess.Prompt] = {}
    too_long = 0
    for chat in _conversations(cfg, manifest):
        ids = _prompt(cfg, tokenizer, chat.messages, chat.tools, chat.where)
        if len(ids) < cfg.tokenize.max_length_tokens:
            held_out = chat.split == "held_out"
            prompts[chat.sample_id] = inprocess.Prompt(ids, chat.turns[-1], held_out)
        else:
            too_long += 1
    names = inprocess.answer_all(cfg, prompts, out, report)
    return names, {"too_long": too_long}


def _by_servers(
    cfg: RunConfig,
    manifest: dict[str, Any],
    tokenizer: Any,
    out: Path,
    report: StageReport,
) -> tuple[list[str], dict[str, int]]:
    if cfg.regenerate.loop_ngram is not None:
        raise UserError(
            where="regenerate.loop_ngram",
            found=str(cfg.regenerate.loop_ngram),
            expected="null: servers do not cut loops",
            remedy="Leave it out, or answer in process.",
        )
    total = sum(len(chat.turns) for chat in _conversations(cfg, manifest))

    def render(messages: list[dict], tools: list[dict] | None, where: str) -> list[int]:
        return _prompt(cfg, tokenizer, messages, tools, where)

    chats = _conversations(cfg, manifest)
    return servers.answer_all(cfg, tokenizer, chats, total, render, out, report)
