"""The tokenize stage: answers (or finished conversations) -> RUN/data/tokens: input_ids and
loss_mask.

An answer that the target wrote keeps the ids it was written in. A sample without a supervised token
teaches nothing: it is counted and listed in the manifest, not kept. Parts are independent: they are
made in parallel, and a killed run goes on with the missing ones.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from draftsmith import manifest as manifests
from draftsmith import prepare, regenerate, tables
from draftsmith.config import RunConfig
from draftsmith.core import StageResult, UserError
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.parallel import num_workers, ordered_map
from draftsmith.target.load import eos_ids, load_tokenizer, tokenizer_digest
from draftsmith.tokenize import work
from draftsmith.tokenize.samples import Samples
from draftsmith.tokenize.work import Job, Rules, counts_of, tokenize_part

LISTED = 100  # ids of useless samples that the manifest names
SMALL_ROWS = 4096  # below this, starting processes costs more than they save


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
        manifest = manifests.begin(out, "tokens/2", inputs, remake=True)
        if manifest["complete"]:
            return StageResult("tokenize", str(out), skipped=True, summary=manifest["counts"])
        jobs = _jobs(cfg, conversations, answers)
        _work(cfg, jobs, eos_ids(tokenizer, cfg.target), report)
        counts = _counts([job.out for job in jobs])
        if not counts.get("train"):
            raise UserError(
                where="tokenize",
                found="no training sample with a supervised token",
                expected="at least one",
                remedy="Look at the answers: are they empty? Is tokenize.max_length_tokens shorter than the prompts?",
            )
        files = {job.out.name: tables.entry(job.out) for job in jobs}
        manifest = manifests.finish(out, manifest, files, counts)
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
        **cfg.tokenize.model_dump(exclude={"workers"}),
    }


def read_samples(cfg: RunConfig, manifest: dict[str, Any], split: str | None = None) -> Samples:
    """The samples of a split, or of both."""
    names = sorted(name for name in manifest["files"] if name.endswith(".parquet"))
    return Samples([folder(cfg) / name for name in names], split)


def _jobs(cfg: RunConfig, conversations: dict, answers: dict | None) -> list[Job]:
    sources = regenerate.folder(cfg) if answers else prepare.folder(cfg)
    files = (answers or conversations)["files"]
    names = [name for name in sorted(files) if name.endswith(".parquet")]
    outs = [folder(cfg) / tables.part_name(n) for n in range(len(names))]
    if not answers:
        return [Job(sources / name, out) for name, out in zip(names, outs, strict=True)]
    labels, codes = _labels(cfg, conversations)
    jobs = []
    for name, out in zip(names, outs, strict=True):
        ids = pq.read_table(sources / name, columns=["sample_id"])["sample_id"].to_pylist()
        mine = [labels[codes[i]] for i in ids]
        jobs.append(Job(sources / name, out, [s for s, _ in mine], [n for _, n in mine]))
    return jobs


def _labels(cfg: RunConfig, conversations: dict) -> tuple[list[tuple[str, str]], np.ndarray]:
    """(split, source) pairs, and which of them each conversation has, by sample_id [n]."""
    labels: dict[tuple[str, str], int] = {}
    codes = np.empty(tables.num_rows(conversations), np.int32)
    for name in conversations["files"]:
        if not name.endswith(".parquet"):
            continue
        table = pq.read_table(
            prepare.folder(cfg) / name, columns=["sample_id", "split", "source"]
        ).to_pydict()
        for i, *label in zip(*table.values(), strict=True):
            codes[i] = labels.setdefault((label[0], label[1]), len(labels))
    return list(labels), codes


def _work(cfg: RunConfig, jobs: list[Job], eos: list[int], report: StageReport) -> None:
    sizes = {job.out: pq.read_metadata(job.source).num_rows for job in jobs}
    missing = [job for job in jobs if not job.out.exists()]
    total, left = sum(sizes.values()), sum(sizes[job.out] for job in missing)
    done = total - left
    report.working(total, "samples", done=done)
    rules = Rules(
        target=cfg.target,
        tokenize=cfg.tokenize,
        eos=eos,
        paths=[source.path for source in cfg.prepare.sources],
        skip_refused=cfg.prepare.bad_lines == "skip",
    )
    small = left < SMALL_ROWS and cfg.tokenize.workers == "auto"
    workers = 1 if small else min(num_workers(cfg.tokenize.workers), max(len(missing), 1))
    results = ordered_map(
        tokenize_part, missing, workers=workers, setup=work.setup, setup_args=(rules,)
    )
    for job, _ in zip(missing, results, strict=True):
        done += sizes[job.out]
        report.progress(done)


def _counts(parts: list[Path]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    lists: dict[str, list] = {}
    for part in parts:
        for key, value in counts_of(part).items():
            if isinstance(value, list):
                lists[key] = (lists.get(key, []) + value)[:LISTED]
            else:
                total[key] += value
    return {**total, **lists}
