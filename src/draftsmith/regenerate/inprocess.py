"""Answers by the target itself, in Transformers: batches of like length, greedy or sampled. Good for small
models; in this process, or in one for every GPU that the engine finds.

Files of `answers_per_file` answers are written as they are finished; a killed run goes on with the
missing ones.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith import tables
from draftsmith.config import RunConfig
from draftsmith.decode.batch import generate_batch
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.sampling import Sampling
from draftsmith.engines import Tasks, for_workers, run_tasks
from draftsmith.engines.local import Done, Say
from draftsmith.monitor.state import StageReport
from draftsmith.regenerate.servers import question_seed
from draftsmith.target.load import eos_ids, load_target, load_tokenizer

TICK_S = 1.0


@dataclass(frozen=True)
class Prompt:
    """A question's token ids, its place in the conversation, and whether it is held out."""

    ids: list[int]
    turn: int
    held_out: bool


@dataclass(frozen=True)
class Answers:
    """What a worker says: so many answers of a file, and their tokens; none: it is at work."""

    file: int
    count: int = 0
    tokens: int = 0


File = tuple[str, dict[int, Prompt]]
"""A file's path and its prompts by sample id, in the order in which they are answered."""


def answer_all(
    cfg: RunConfig, prompts: dict[int, Prompt], out: Path, report: StageReport
) -> list[str]:
    """Answer the prompts (by sample id) whose files are missing in `out`; the names of all files."""
    files = _plan_files(prompts, cfg.regenerate.answers_per_file)
    names = list(files)
    missing = [i for i, name in enumerate(names) if not (out / name).exists()]
    done = len(prompts) - sum(len(files[names[i]]) for i in missing)
    report.working(len(prompts), "answers", done=done)
    made: dict[int, Answers] = {}

    def told(said: Answers) -> None:
        before = made.get(said.file, Answers(said.file))
        made[said.file] = Answers(said.file, before.count + said.count, before.tokens + said.tokens)
        if said.count:
            tokens = sum(of_file.tokens for of_file in made.values())
            report.progress(done + sum(x.count for x in made.values()), tokens=tokens)
        else:
            report.tick()

    def lost(said: str, numbers: list[int]) -> None:
        for number in numbers:
            made.pop(number, None)
        report.event("worker_lost", said=said, files=[names[number] for number in numbers])
        print(f"regenerate: {said}; its files are answered again by another", flush=True)

    def load(number: int) -> File:
        path = str((out / names[number]).absolute())
        return path, {i: prompts[i] for i in files[names[number]]}

    if missing:
        tasks = Tasks(
            "regenerate", partial(answer_files, for_workers(cfg)), missing, load,
            on_message=told, on_loss=lost, on_wait=report.tick, folders=[str(out)],
        )  # fmt: skip
        run_tasks(cfg, tasks, workers=cfg.regenerate.workers)
    return names


def _plan_files(prompts: dict[int, Prompt], size: int) -> dict[str, list[int]]:
    """File name -> sample ids; prompts of like length together, so that little is padded."""
    order = sorted(prompts, key=lambda i: (len(prompts[i].ids), i))
    return {
        f"answers-{n:05d}.parquet": order[at : at + size]
        for n, at in enumerate(range(0, len(order), size))
    }


def answer_files(cfg: RunConfig, files: Iterator[tuple[int, File]], say: Say, done: Done) -> None:
    """A worker: load the target, answer and write the files that come."""
    model = load_target(cfg.target)
    tokenizer: Any = load_tokenizer(cfg.target)
    eos = eos_ids(tokenizer, cfg.target)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    for number, (path, prompts) in files:
        tick = _now_and_then(partial(say, Answers(number)))
        rows, sample_ids = [], list(prompts)
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
                on_step=tick,
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
            say(Answers(number, len(batch), sum(len(ids) for ids, _ in answers)))
        tables.write_table(Path(path), rows, tables.ANSWERS)
        done(number)


def _now_and_then(tell: Any) -> Any:
    """At most every TICK_S: what another process hears of every token would cost more than the token."""
    told = time.monotonic()

    def tick() -> None:
        nonlocal told
        if time.monotonic() - told > TICK_S:
            told = time.monotonic()
            tell()

    return tick


def _sampling(cfg: RunConfig, sample_id: int, prompt: Prompt) -> Sampling:
    """How an answer is drawn; by its own seed, so that a resumed run draws the same."""
    asked = cfg.regenerate
    if prompt.held_out or not asked.temperature:
        return Sampling()
    seed = question_seed(cfg, sample_id, prompt.turn)
    return Sampling(asked.temperature, asked.top_p, asked.top_k, seed)
