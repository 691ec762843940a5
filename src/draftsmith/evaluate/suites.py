"""Benchmarks by name, and prompt files of your own: where their rows come from, what is asked, and the
prompts' tokens under the target's chat template.

Hub ids and wordings are those of the DFlash and DDTree papers' code (z-lab/dflash benchmark.py,
liranringel/ddtree), so that taus can be set beside published ones. Only the user's turns are taken: the
target answers them itself, and in a conversation of several turns the later ones follow its
autoregressive answer.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download

from draftsmith import files
from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.decode.methods import Prompt
from draftsmith.evaluate import bfcl
from draftsmith.target.load import TargetInfo, check_ids
from draftsmith.tokenize.template import render_prompt

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """Where a set comes from on the hub, and how a row reads as one of your own files' (`own_turns`; its
    category is the domain). `file`: one of the set's files in place of what the hub makes of them.
    """

    hub: str
    split: str
    row: Callable[[Row], Row]
    name: str | None = None
    file: str | None = None


def _math(key: str) -> Callable[[Row], Row]:
    return lambda row: {"prompt": row[key] + BOXED, "category": row.get("subject") or "math"}


def _humaneval(row: Row) -> Row:
    how = "Write a solution to the following problem and make sure that it passes the tests:"
    return {"prompt": f"{how}\n```python\n{row['prompt']}\n```", "category": "code"}


def _livecodebench(row: Row) -> Row:
    code = row.get("starter_code") or ""
    how = (
        f"Use this starter code:\n```python\n{code}\n```"
        if code
        else "Read the input from stdin and write the answer to stdout."
    )
    asked = f"{row['question_content']}\n\nWrite a Python program that solves it. {how}"
    return {"prompt": asked, "category": row.get("difficulty") or "code"}


def _alpaca(row: Row) -> Row:
    more = f"\n\n{row['input']}" if row.get("input") else ""
    return {"prompt": row["instruction"] + more, "category": "chat"}


def _swe_bench(row: Row) -> Row:
    asked = f"{row['problem_statement']}\n\nPlease fix the issue"
    return {"prompt": asked, "category": row.get("repo") or "code"}


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "test", _math("question"), "main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", _math("problem")),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", _math("problem")),
    "aime25": Benchmark("MathArena/aime_2025", "train", _math("problem")),
    "humaneval": Benchmark("openai/openai_humaneval", "test", _humaneval),
    "mbpp": Benchmark(
        "google-research-datasets/mbpp", "test",
        lambda row: {"prompt": row["prompt"], "category": "code"}, "sanitized",
    ),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite", "train", _livecodebench, file="test6.jsonl"
    ),
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts", "train",
        lambda row: {"turns": row["prompt"], "category": row.get("category") or "chat"},
    ),
    "alpaca": Benchmark("tatsu-lab/alpaca", "train", _alpaca),
    "swe-bench-lite": Benchmark("princeton-nlp/SWE-bench_Lite", "test", _swe_bench),
    "bfcl": Benchmark(
        "gorilla-llm/Berkeley-Function-Calling-Leaderboard", "train", bfcl.as_chat,
        file="BFCL_v3_simple.json",
    ),
}  # fmt: skip


def template_kwargs(cfg: RunConfig) -> dict[str, Any]:
    """The chat template's variables for suites."""
    said = {} if cfg.evaluate.thinking is None else {"enable_thinking": cfg.evaluate.thinking}
    return {**cfg.tokenize.template_kwargs, **said}


def digests(cfg: RunConfig) -> dict[str, str]:
    """What each suite but held_out is made from: a file's digest, or the hub's name."""
    out = {}
    for suite in cfg.evaluate.suites:
        path = _path(cfg, suite)
        if path is not None:
            _exists(suite, path)
            out[suite] = files.file_digest(path)
        elif suite in BENCHMARKS:
            out[suite] = BENCHMARKS[suite].hub
    return out


def load(cfg: RunConfig, suite: str, tokenizer: Any, info: TargetInfo) -> list[Prompt]:
    """At most `evaluate.max_prompts` first turns, chosen by a hash of their text. Raises UserError for
    rows that are no prompts and for prompts that the target cannot read.
    """
    path = _path(cfg, suite)
    rows = _hub_rows(suite) if path is None else _file_rows(suite, path)
    asked = [_asked(suite, path, number, row) for number, row in rows]
    asked.sort(key=lambda a: files.digest([cfg.seed, a.messages, a.later, a.tools]))
    if not asked:
        raise UserError(
            where=f"evaluate.suites, {suite}",
            found="no prompts",
            expected="at least one",
            remedy="Check the file.",
        )
    _knows_thinking(cfg, tokenizer, asked[0])
    return [
        rendered(cfg, replace(prompt, sample_id=i), tokenizer, info)
        for i, prompt in enumerate(asked[: cfg.evaluate.max_prompts])
    ]


def rendered(cfg: RunConfig, prompt: Prompt, tokenizer: Any, info: TargetInfo) -> Prompt:
    """The prompt with the tokens of its messages."""
    where = f"evaluate.suites, {prompt.origin}"
    ids = render_prompt(tokenizer, prompt.messages, prompt.tools, template_kwargs(cfg), where=where)
    check_prompt(ids, info, where)
    return replace(prompt, ids=ids, text=ids)


def check_prompt(ids: list[int], info: TargetInfo, where: str) -> None:
    """Raise UserError for a prompt that leaves the target's context no room for two tokens, or is of
    another tokenizer.
    """
    check_ids(max(ids), info, where)
    context = info.max_position_embeddings
    if context and len(ids) > context - 2:
        raise UserError(
            where=where,
            found=f"a prompt of {len(ids)} tokens",
            expected=f"at most {context - 2}: the target reads {context} (max_position_embeddings)",
            remedy="Leave the prompt out, or shorten it.",
        )


def follower(
    cfg: RunConfig, tokenizer: Any, info: TargetInfo
) -> Callable[[Prompt, list[int]], Prompt | None]:
    """The next turn of a conversation, behind the target's answer."""

    def follow(prompt: Prompt, answer: list[int]) -> Prompt | None:
        if not prompt.later:
            return None
        said = tokenizer.decode(answer, skip_special_tokens=True)
        messages = [
            *prompt.messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": prompt.later[0]},
        ]
        turned = replace(prompt, messages=messages, later=prompt.later[1:], turn=prompt.turn + 1)
        return rendered(cfg, turned, tokenizer, info)

    return follow


def _path(cfg: RunConfig, suite: str) -> Path | None:
    """A suite's own file, or the one that stands for the hub's."""
    named = cfg.evaluate.data.get(suite)
    if named is not None:
        return Path(named)
    return Path(suite) if suite.endswith((".jsonl", ".jsonl.gz")) else None


def _exists(suite: str, path: Path) -> None:
    if not path.is_file():
        raise UserError(
            where=f"evaluate.suites, {suite}",
            found=f"no file {path}",
            expected="a .jsonl, .json, .jsonl.gz or .parquet file",
            remedy="Check the path.",
        )


def _hub_rows(suite: str) -> Iterator[tuple[int, Row]]:
    bench = BENCHMARKS[suite]
    remedy = f"Or name a file of it: evaluate.data: {{{suite}: FILE}}."
    try:
        if bench.file:
            file = hf_hub_download(bench.hub, bench.file, repo_type="dataset")
            return _file_rows(suite, Path(file))
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]

        rows: Any = load_dataset(bench.hub, bench.name, split=bench.split)
        return enumerate(rows, 1)
    except ImportError:
        raise UserError(
            where=f"evaluate.suites, {suite}",
            found="no package datasets",
            expected="the hub's reader",
            remedy=f"pip install 'draftsmith[hub]'. {remedy}",
        ) from None
    except Exception as error:  # whatever the hub, the network or the reader raise
        raise UserError(
            where=f"evaluate.suites, {suite}",
            found=f"{bench.hub}, which does not load ({' '.join(str(error).split())[:200]})",
            expected="a data set of the hub",
            remedy=f"Check the network and HF_TOKEN. {remedy}",
        ) from None


def _file_rows(suite: str, path: Path) -> Iterator[tuple[int, Row]]:
    """Rows with their line numbers."""
    _exists(suite, path)
    try:
        if path.suffix == ".parquet":
            yield from enumerate(pq.read_table(path).to_pylist(), 1)
            return
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line, path, number)
    except (ValueError, OSError, EOFError, pa.ArrowException, RecursionError) as error:
        raise UserError(
            where=f"evaluate.suites, {path}",
            found=f"what cannot be read ({' '.join(str(error).split())[:200]})",
            expected="a JSON object a line",
            remedy="Mend the file.",
        ) from None


def _object(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _unreadable(path, number, f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise _unreadable(path, number, f"{type(row).__name__} {str(row)[:80]!r}")
    return row


def _unreadable(path: Path, number: int, found: str) -> UserError:
    return UserError(
        where=f"{path}:{number}",
        found=found,
        expected="a JSON object a line",
        remedy="Mend or drop the line.",
    )


def _asked(suite: str, path: Path | None, number: int, row: Any) -> Prompt:
    """A row's turns. Raises UserError when it has none."""
    bench = BENCHMARKS.get(suite)
    try:
        own = bench.row(row) if bench else row
        system, turns = own_turns(own)
        domain = str(own.get("category") or own.get("domain") or (path.stem if path else suite))
        tools = own.get("tools") or None
        found = None if turns else "no text of the user"
    except KeyError as error:
        found = f"a row without {error}"
    except ValueError as error:
        found = str(error)
    except (TypeError, AttributeError):
        found = f"a row of another form: {json.dumps(row, default=str)[:120]}"
    if found is not None:
        raise UserError(
            where=f"{path or suite}:{number}",
            found=found,
            expected=f"a row of {bench.hub}" if bench else "messages, turns or a prompt, in text",
            remedy="Mend or drop the row.",
        )
    messages = [*system, {"role": "user", "content": turns[0]}]
    origin = f"{path or suite}:{number}"
    return Prompt(
        suite, 0, [], [], domain, messages=messages, tools=tools, later=turns[1:], origin=origin
    )


def own_turns(row: Row) -> tuple[list[dict[str, Any]], list[str]]:
    """System messages, and the user's turns, of {"messages": [...]}, {"turns": [...]} or {"prompt":
    a text or list}. Raises KeyError or ValueError for a row of another form.
    """
    system: list[dict[str, Any]] = []
    if "messages" in row:
        said = row["messages"]
        system = [m for m in said if m["role"] == "system"]
        turns = [m["content"] for m in said if m["role"] == "user"]
    else:
        turns = row["turns"] if "turns" in row else row["prompt"]
        turns = list(turns) if isinstance(turns, list | tuple) else [turns]
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"{str(turn)[:80]!r} ({type(turn).__name__}) as what the user says")
    return system, turns


def _knows_thinking(cfg: RunConfig, tokenizer: Any, prompt: Prompt) -> None:
    """Refuse `thinking` on a template that does not know it: the prompts would be as they were."""
    if cfg.evaluate.thinking is None:
        return
    where = "evaluate.thinking"
    args = (tokenizer, prompt.messages, prompt.tools)
    both = [
        render_prompt(*args, {**template_kwargs(cfg), "enable_thinking": value}, where=where)
        for value in (True, False)
    ]
    if both[0] == both[1]:
        raise UserError(
            where=where,
            found=f"{cfg.evaluate.thinking}, and a chat template without enable_thinking",
            expected="a template with two ways",
            remedy="Leave evaluate.thinking out.",
        )
