"""The tokenize stage: answers (or finished conversations) -> RUN/data/tokens: input_ids and
loss_mask.

An answer that the target wrote keeps the ids it was written in. A sample without a supervised token
teaches nothing: it is counted and listed in the manifest, not kept.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith import manifest as manifests
from draftsmith import prepare, regenerate, tables
from draftsmith.config import RunConfig
from draftsmith.core import Sample, StageResult, UserError
from draftsmith.monitor.state import stage_report
from draftsmith.target.load import eos_ids, load_tokenizer, tokenizer_digest
from draftsmith.tokenize.template import render_chat

LISTED = 100  # ids of useless samples that the manifest names


def folder(cfg: RunConfig) -> Path:
    """Where tokens go."""
    return cfg.root / "data" / "tokens"


def run(cfg: RunConfig) -> StageResult:
    """Tokenize every sample of both splits."""
    out = folder(cfg)
    conversations = prepare.finished(cfg)
    answers = regenerate.finished(cfg) if cfg.regenerate.enabled else None
    with stage_report(cfg.root, "tokenize") as report:
        tokenizer = load_tokenizer(cfg.target)
        inputs = _inputs(cfg, conversations, answers, tokenizer)
        manifest = manifests.begin(out, "tokens/1", inputs, remake=True)
        if manifest["complete"]:
            return StageResult("tokenize", str(out), skipped=True, summary=manifest["counts"])
        report.working(conversations["files"]["part-00000.parquet"]["rows"], "samples")
        rows, counts = _tokenize_all(cfg, conversations, answers, tokenizer)
        file = tables.write_table(out / "part-00000.parquet", rows, tables.TOKENS)
        report.progress(report.state["total"])
        manifest = manifests.finish(out, manifest, {"part-00000.parquet": file}, counts)
    return StageResult("tokenize", str(out), summary=manifest["counts"])


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete output for this configuration, or a UserError."""
    answers = regenerate.finished(cfg) if cfg.regenerate.enabled else None
    inputs = _inputs(cfg, prepare.finished(cfg), answers, load_tokenizer(cfg.target))
    return manifests.required(folder(cfg), "tokenize", inputs)


def _inputs(cfg: RunConfig, conversations: dict, answers: dict | None, tokenizer: Any) -> dict:
    return {
        "conversations": conversations["digest"],
        "answers": answers["digest"] if answers else None,
        "tokenizer": tokenizer_digest(tokenizer),
        **cfg.tokenize.model_dump(),
    }


def read_samples(
    cfg: RunConfig, manifest: dict[str, Any], split: str | None = None
) -> list[Sample]:
    """The samples of a split, or of both."""
    return [
        Sample(**row)
        for row in tables.read_rows(folder(cfg), manifest)
        if split is None or row["split"] == split
    ]


def _tokenize_all(
    cfg: RunConfig, conversations: dict, answers: dict | None, tokenizer: Any
) -> tuple[list[dict], dict]:
    counts: Counter[str] = Counter()
    useless: list[int] = []
    rows = []
    for meta, ids, mask in _with_masks(cfg, conversations, answers, tokenizer):
        if len(ids) > cfg.tokenize.max_length_tokens:
            counts["too_long"] += 1
            if cfg.tokenize.too_long == "drop":
                continue
            ids, mask = (x[: cfg.tokenize.max_length_tokens] for x in (ids, mask))
        if not any(mask):
            counts["without_supervised_tokens"] += 1
            useless.append(meta["sample_id"])
            continue
        counts[meta["split"]] += 1
        counts["tokens"] += len(ids)
        counts["supervised_tokens"] += sum(mask)
        rows.append(
            {
                "sample_id": meta["sample_id"],
                "input_ids": ids,
                "loss_mask": mask,
                "source": meta["source"],
                "split": meta["split"],
            }
        )
    if not counts["train"]:
        raise UserError(
            where="tokenize",
            found="no training sample with a supervised token",
            expected="at least one",
            remedy="Look at the answers: are they empty? Is tokenize.max_length_tokens shorter than the prompts?",
        )
    return rows, {**counts, "listed_without_supervised_tokens": useless[:LISTED]}


def _with_masks(
    cfg: RunConfig, conversations: dict, answers: dict | None, tokenizer: Any
) -> Iterator[tuple[dict, list, list]]:
    metas = tables.read_rows(prepare.folder(cfg), conversations)
    if answers is None:
        eos = eos_ids(tokenizer, cfg.target)
        for row in metas:
            chat = [*json.loads(row["messages"]), json.loads(row["answer"])]
            tools = json.loads(row["tools"]) if row["tools"] else None
            yield (
                row,
                *render_chat(
                    tokenizer,
                    chat,
                    tools,
                    cfg.tokenize.template_kwargs,
                    eos,
                    where=prepare.place(cfg, row),
                ),
            )
        return
    by_id = {row["sample_id"]: row for row in metas}
    for row in tables.read_rows(regenerate.folder(cfg), answers):
        mask = [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"])
        yield by_id[row["sample_id"]], row["prompt_ids"] + row["answer_ids"], mask
