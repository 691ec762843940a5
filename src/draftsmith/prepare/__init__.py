"""The prepare stage: files of conversations -> RUN/data/conversations, exact duplicates dropped,
split by prompt.

The split is a hash of the prompt: the same prompt is always on the same side, whatever else the
files hold.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith import manifest as manifests
from draftsmith.config import RunConfig, SourceConfig
from draftsmith.core import StageResult, UserError
from draftsmith.files import file_digest
from draftsmith.monitor.state import stage_report
from draftsmith.prepare.readers import read_messages
from draftsmith.tables import CONVERSATIONS, write_table

ASKED = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content")
"""What of a message makes it another one; ids and time stamps do not."""


def folder(cfg: RunConfig) -> Path:
    """Where conversations go."""
    return cfg.root / "data" / "conversations"


def run(cfg: RunConfig) -> StageResult:
    """Read, check, drop exact duplicates, split, write."""
    out = folder(cfg)
    with stage_report(cfg.root, "prepare") as report:
        manifest = manifests.begin(out, "conversations/1", _inputs(cfg), remake=True)
        if manifest["complete"]:
            return StageResult("prepare", str(out), skipped=True, summary=manifest["counts"])
        counts: Counter[str] = Counter()
        report.working(None, "conversations")
        rows = _read_all(cfg, counts)
        rows = _select(rows, cfg, counts)
        file = write_table(out / "part-00000.parquet", rows, CONVERSATIONS)
        report.progress(len(rows))
        manifest = manifests.finish(out, manifest, {"part-00000.parquet": file}, dict(counts))
    return StageResult("prepare", str(out), summary=manifest["counts"])


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the complete output for this configuration, or a UserError."""
    return manifests.required(folder(cfg), "prepare", _inputs(cfg))


def _inputs(cfg: RunConfig) -> dict[str, Any]:
    # The path is left out: a file that moves stays the same data.
    sources = [
        {
            "format": source.format,
            "name": source.name or Path(source.path).stem,
            "weight": source.weight,
            "sha256": _source_digest(source),
        }
        for source in cfg.prepare.sources
    ]
    return {
        **cfg.prepare.model_dump(exclude={"sources"}),
        "sources": sources,
        "seed": cfg.seed,
        "regenerate": cfg.regenerate.enabled,
    }


def place(cfg: RunConfig, row: dict[str, Any]) -> str:
    """file:line of a conversation, for messages."""
    index, _, number = row["origin"].partition(":")
    return f"{cfg.prepare.sources[int(index)].path}:{number}"


def _source_digest(source: SourceConfig) -> str:
    path = Path(source.path)
    if not path.is_file():
        raise UserError(
            where=f"prepare.sources: {path}",
            found="no such file",
            expected="a JSONL file of conversations",
            remedy="Check the path.",
        )
    return file_digest(path)


def _read_all(cfg: RunConfig, counts: Counter[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    seen: set[bytes] = set()
    for index, source in enumerate(cfg.prepare.sources):
        path = Path(source.path)
        for number, row in read_messages(path):
            counts["read"] += 1
            messages, answer = _split_answer(
                row["messages"], f"{path}:{number}", keep=not cfg.regenerate.enabled
            )
            question = [[m.get(key) for key in ASKED] for m in messages]
            asked = hashlib.sha256(f"{cfg.seed}\0{json.dumps(question, sort_keys=True)}".encode())
            key = (
                asked.digest()
            )  # of the messages alone: a question is on one side whatever its tools
            said = [answer.get(key) for key in ASKED] if answer else None
            asked.update(json.dumps([row["tools"], said], sort_keys=True).encode())
            whole = asked.digest()
            if whole in seen:
                counts["duplicates"] += 1
                continue
            seen.add(whole)
            share = int.from_bytes(key[:8], "big") / 2**64
            if int.from_bytes(key[8:16], "big") / 2**64 >= source.weight:
                counts["left_out_by_weight"] += 1
                continue
            rows.append(
                {
                    "sample_id": -1,
                    "origin": f"{index}:{number}",
                    "source": source.name or row["source"] or path.stem,
                    "split": "held_out" if share < cfg.prepare.held_out else "train",
                    "share": share,
                    "messages": json.dumps(messages),
                    "tools": json.dumps(row["tools"]) if row.get("tools") else None,
                    "answer": json.dumps(answer) if answer else None,
                }
            )
    return rows


def _split_answer(
    messages: list[dict[str, Any]], where: str, *, keep: bool
) -> tuple[list[dict[str, Any]], dict | None]:
    """(prompt, final answer). A final answer is dropped when the target will write its own."""
    last = messages[-1]["role"]
    if last == "assistant":
        if len(messages) == 1:
            raise UserError(
                where=where,
                found="an answer without a question",
                expected="a user message first",
                remedy="Mend or delete the line.",
            )
        return messages[:-1], messages[-1] if keep else None
    if keep:
        raise UserError(
            where=where,
            found=f"a conversation that ends with role '{last}'",
            expected="an assistant's answer, since regenerate.enabled is false",
            remedy="Set regenerate.enabled: true, or delete the line.",
        )
    return messages, None


def _select(
    rows: list[dict[str, Any]], cfg: RunConfig, counts: Counter[str]
) -> list[dict[str, Any]]:
    """Apply the caps, by hash; make sure there is a held-out prompt when a share was asked for;
    number the samples.
    """
    if cfg.prepare.held_out and rows and not any(row["split"] == "held_out" for row in rows):
        lowest = min(row["share"] for row in rows)
        for row in rows:
            if row["share"] == lowest:
                row["split"] = "held_out"
    for split, cap in (("train", cfg.prepare.max_samples), ("held_out", cfg.prepare.max_held_out)):
        mine = [row for row in rows if row["split"] == split]
        if cap is not None and len(mine) > cap:
            dropped = {id(row) for row in sorted(mine, key=lambda row: row["share"])[cap:]}
            rows = [row for row in rows if id(row) not in dropped]
            counts[f"left_out_by_cap_{split}"] = len(dropped)
    for split in ("train", "held_out"):
        counts[split] = sum(row["split"] == split for row in rows)
    if not counts["train"]:
        raise UserError(
            where="prepare.sources",
            found="no conversation for training",
            expected="at least one",
            remedy="Add data, or lower prepare.held_out.",
        )
    for number, row in enumerate(rows):
        row["sample_id"] = number
        del row["share"]
    return rows
