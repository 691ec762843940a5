"""Answers by the target in this process: batches of like length, greedy or sampled. Good for small
models.

Files of `answers_per_file` answers are written as they are finished; a killed run goes on with the
missing ones.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith import tables
from draftsmith.config import RunConfig
from draftsmith.decode.batch import generate_batch
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.sampling import Sampling
from draftsmith.monitor.state import StageReport
from draftsmith.regenerate.servers import question_seed
from draftsmith.target.load import eos_ids, load_target


@dataclass(frozen=True)
class Prompt:
    """A question's token ids, its place in the conversation, and whether it is held out."""

    ids: list[int]
    turn: int
    held_out: bool


def answer_all(
    cfg: RunConfig,
    tokenizer: Any,
    prompts: dict[int, Prompt],
    out: Path,
    report: StageReport,
) -> list[str]:
    """Answer the prompts (by sample id) whose files are missing in `out`; the names of all files."""
    files = _plan_files(prompts, cfg.regenerate.answers_per_file)
    missing = {name: ids for name, ids in files.items() if not (out / name).exists()}
    done = len(prompts) - sum(map(len, missing.values()))
    report.working(len(prompts), "answers", done=done)
    if missing:
        _answer(cfg, tokenizer, prompts, missing, out, report)
    return list(files)


def _plan_files(prompts: dict[int, Prompt], size: int) -> dict[str, list[int]]:
    """File name -> sample ids; prompts of like length together, so that little is padded."""
    order = sorted(prompts, key=lambda i: (len(prompts[i].ids), i))
    return {
        f"answers-{n:05d}.parquet": order[at : at + size]
        for n, at in enumerate(range(0, len(order), size))
    }


def _answer(
    cfg: RunConfig,
    tokenizer: Any,
    prompts: dict[int, Prompt],
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
                model,
                [prompts[i].ids for i in batch],
                ends,
                pad_id=pad_id,
                sampling=[_sampling(cfg, i, prompts[i]) for i in batch],
                on_step=report.tick,
            )
            rows += [
                {
                    "sample_id": i,
                    "prompt_ids": prompts[i].ids,
                    "answer_ids": ids,
                    "stop_reason": reason,
                    "turn": prompts[i].turn,
                    "message": None,
                }
                for i, (ids, reason) in zip(batch, answers, strict=True)
            ]
            done, tokens = done + len(batch), tokens + sum(len(ids) for ids, _ in answers)
            report.progress(done, tokens=tokens)
        tables.write_table(out / name, rows, tables.ANSWERS)


def _sampling(cfg: RunConfig, sample_id: int, prompt: Prompt) -> Sampling:
    """How an answer is drawn; by its own seed, so that a resumed run draws the same."""
    asked = cfg.regenerate
    if prompt.held_out or not asked.temperature:
        return Sampling()
    seed = question_seed(cfg, sample_id, prompt.turn)
    return Sampling(asked.temperature, asked.top_p, asked.top_k, seed)
