"""The regenerate stage: the target answers every prompt itself, greedily, in process. A drafter
learns what the target would say, not what somebody else said.

Files of `answers_per_file` answers are written as they are finished; a killed run goes on with the
missing ones.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith import manifest as manifests
from draftsmith import prepare, tables
from draftsmith.config import RunConfig
from draftsmith.core import StageResult
from draftsmith.decode.batch import generate_batch
from draftsmith.decode.ends import AnswerEnd
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.target.load import (
    check_ids,
    eos_ids,
    inspect_target,
    load_target,
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
    with stage_report(cfg.root, "regenerate") as report:
        tokenizer = load_tokenizer(cfg.target)
        manifest = manifests.begin(
            out, "answers/1", _inputs(cfg, conversations, tokenizer), remake=False
        )
        if manifest["complete"]:
            return StageResult("regenerate", str(out), skipped=True, summary=manifest["counts"])
        prompts, too_long = _render_all(cfg, conversations, tokenizer)
        files = _plan_files(prompts, cfg.regenerate.answers_per_file)
        missing = [name for name in files if not (out / name).exists()]
        report.working(
            len(prompts),
            "answers",
            done=sum(len(ids) for name, ids in files.items() if name not in missing),
        )
        if missing:
            _answer(cfg, tokenizer, prompts, {name: files[name] for name in missing}, out, report)
        entries = {name: tables.entry(out / name) for name in files}
        counts = Counter(row["stop_reason"] for row in tables.read_rows(out, {"files": entries}))
        manifest = manifests.finish(
            out, manifest, entries, {"answers": len(prompts), "too_long": too_long, **counts}
        )
    return StageResult("regenerate", str(out), summary=manifest["counts"])


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete output for this configuration, or a UserError."""
    inputs = _inputs(cfg, prepare.finished(cfg), load_tokenizer(cfg.target))
    return manifests.required(folder(cfg), "regenerate", inputs)


def _inputs(cfg: RunConfig, conversations: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    settings = cfg.regenerate.model_dump(
        include={"max_new_tokens", "temperature", "loop_ngram", "answers_per_file", "batch_size"}
    )
    return {
        "conversations": conversations["digest"],
        "target": inspect_target(cfg.target).identity(),
        "dtype": cfg.target.dtype,
        "tokenizer": tokenizer_digest(tokenizer),
        **settings,
        "max_length_tokens": cfg.tokenize.max_length_tokens,
        "template_kwargs": cfg.tokenize.template_kwargs,
    }


def _render_all(
    cfg: RunConfig, conversations: dict[str, Any], tokenizer: Any
) -> tuple[dict[int, list[int]], int]:
    """Prompt ids by sample; prompts that leave no room for an answer are counted and left out."""
    prompts, too_long, info = {}, 0, inspect_target(cfg.target)
    for row in tables.read_rows(prepare.folder(cfg), conversations):
        tools = json.loads(row["tools"]) if row["tools"] else None
        ids = render_prompt(
            tokenizer,
            json.loads(row["messages"]),
            tools,
            cfg.tokenize.template_kwargs,
            where=prepare.place(cfg, row),
        )
        check_ids(max(ids), info, prepare.place(cfg, row))
        if len(ids) < cfg.tokenize.max_length_tokens:
            prompts[row["sample_id"]] = ids
        else:
            too_long += 1
    return prompts, too_long


def _plan_files(prompts: dict[int, list[int]], size: int) -> dict[str, list[int]]:
    """File name -> sample ids; prompts of like length together, so that little is padded."""
    order = sorted(prompts, key=lambda i: (len(prompts[i]), i))
    return {
        f"answers-{n:05d}.parquet": order[at : at + size]
        for n, at in enumerate(range(0, len(order), size))
    }


def _answer(
    cfg: RunConfig,
    tokenizer: Any,
    prompts: dict[int, list[int]],
    files: dict[str, list[int]],
    out: Path,
    report: StageReport,
) -> None:
    model = load_target(cfg.target)
    eos = eos_ids(tokenizer, cfg.target)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    done, tokens = report.state["done"], 0
    for name, sample_ids in files.items():
        rows = []
        for at in range(0, len(sample_ids), cfg.regenerate.batch_size):
            batch = sample_ids[at : at + cfg.regenerate.batch_size]
            ends = [
                AnswerEnd(
                    eos_ids=eos,
                    max_new_tokens=cfg.regenerate.max_new_tokens,
                    loop_ngram=cfg.regenerate.loop_ngram,
                )
                for _ in batch
            ]
            answers = generate_batch(
                model, [prompts[i] for i in batch], ends, pad_id=pad_id, on_step=report.tick
            )
            rows += [
                {"sample_id": i, "prompt_ids": prompts[i], "answer_ids": ids, "stop_reason": reason}
                for i, (ids, reason) in zip(batch, answers, strict=True)
            ]
            done, tokens = done + len(batch), tokens + sum(len(ids) for ids, _ in answers)
            report.progress(done, tokens=tokens)
        tables.write_table(out / name, rows, tables.ANSWERS)
