"""`draftsmith serve-check`: the held-out prompts of a run through a real server with its export, and
without; what is accepted there compared with what `evaluate` measured, and the known mistake named
that fits when they differ.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith import configfile, evaluate, files, prepare, tables
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, UserError
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, read_shape
from draftsmith.drafter.config import DrafterShape
from draftsmith.metrics import NEAR_TIES
from draftsmith.serving import compare, mismatches
from draftsmith.serving.client import Answer, Client, connect
from draftsmith.serving.launch import running
from draftsmith.target.load import eos_ids, load_target, load_tokenizer, unembed
from draftsmith.tokenize.rows import places
from draftsmith.tokenize.template import as_served

DIAGNOSED = 32  # prompts replayed for the diagnosis
RENDERED = 8  # conversations that the server's chat endpoint renders


def run(
    export: Path,
    *,
    server: str | None,
    command: str | None,
    baseline: str | None,
    max_prompts: int,
    wait_s: float,
    as_json: bool,
) -> None:
    """Ask, compare, write RUN/serve/report.json. FaultFound when the served acceptance or text is not
    what was measured.
    """
    cfg, shape, prompts = _run_of(export)
    prompts = prompts[:max_prompts]
    chats = _chats(cfg, prompts[:RENDERED])  # before a server is started: it may refuse
    out, eos = cfg.root / "serve", eos_ids(load_tokenizer(cfg.target), cfg.target)
    result: dict[str, Any] = {"format": "serve/1", "export": str(export), "runs": {}}
    answers: dict[str, list[Answer]] = {}
    for name, options in _servers(export, shape, server, command, baseline).items():
        print(f"serve-check: {name}", flush=True)
        if server:
            answers[name], about = _ask(connect(server), prompts, eos, chats)
        else:
            assert command is not None, "one of the two is given"
            with running(command, options, out / f"{name}.log", wait_s=wait_s) as url:
                answers[name], about = _ask(connect(url), prompts, eos, chats)
        result["server"] = about.pop("server")
        result.setdefault("template", about.pop("template"))
        result["runs"][name] = compare.numbers(answers[name])
    measured = [prompt["methods"] for prompt in prompts]
    result["runs"]["evaluate"] = compare.measured([m["chain"] for m in measured], shape.block_size)
    texts = {name: [a.tokens for a in mine] for name, mine in answers.items()}
    texts["evaluate"] = [m["ar"]["tokens"] for m in measured]
    result["acceptance"] = compare.judge(result["runs"], shape)
    reference = "plain" if "plain" in texts else "evaluate"
    differing = compare.differing(texts["drafter"], texts[reference])
    tie = near_tie(command)
    _diagnose(cfg, export, result, prompts, answers["drafter"], texts[reference], differing, tie)
    result["text"] = compare.text_summary(texts, reference, result.get("gaps", {}))
    files.write_json(out / "report.json", result)
    print(json.dumps(result, indent=1) if as_json else compare.table(result))
    faults = compare.faults(result)
    if faults:
        raise FaultFound("; ".join(faults) + f"; see {out / 'report.json'}")


def _run_of(export: Path) -> tuple[RunConfig, DrafterShape, list[dict[str, Any]]]:
    root = export.absolute().parent
    traces = root / "eval" / evaluate.TRACES
    if not (root / "run.yaml").exists() or not traces.exists():
        raise UserError(
            where=str(export),
            found="a folder that is no evaluated run's export",
            expected="RUN/export of a run whose evaluate stage is done",
            remedy="Run `draftsmith run CONFIG` first.",
        )
    cfg = configfile.load(root / "run.yaml", {"run": str(root)})
    prompts = [p for p in json.loads(traces.read_text()) if p.get("suite") == evaluate.HELD_OUT]
    if not prompts:
        raise UserError(
            where="evaluate.suites",
            found="no held_out",
            expected="the prompts that the server is asked",
            remedy="Add held_out to evaluate.suites and evaluate again.",
        )
    if any("chain" not in prompt["methods"] for prompt in prompts):
        raise UserError(
            where="evaluate.methods",
            found="no chain",
            expected="what the server is compared with",
            remedy="Add chain to evaluate.methods and evaluate again.",
        )
    return cfg, read_shape(export), prompts


def _servers(
    export: Path,
    shape: DrafterShape,
    server: str | None,
    command: str | None,
    baseline: str | None,
) -> dict[str, list[str]]:
    """What to start, and with which options; a server that runs already has its own."""
    if server:
        return {"drafter": []}
    sglang = "sglang" in (command or "")
    out = {
        "plain": [],
        "drafter": drafter_options(str(export.absolute()), shape.block_size, sglang),
    }
    if baseline == "mtp" and sglang:
        out["baseline"] = ["--speculative-algorithm", "NEXTN"]
    elif baseline == "mtp":
        out["baseline"] = [
            "--speculative-config",
            json.dumps({"method": "mtp", "num_speculative_tokens": 1}),
        ]
    elif baseline:
        other = find_drafter(baseline)
        block = read_shape(other, shape.num_target_layers).block_size
        out["baseline"] = drafter_options(str(other), block, sglang)
    return out


def drafter_options(drafter: str, block_size: int, sglang: bool) -> list[str]:
    """The server options that serve this drafter."""
    if sglang:
        return [
            "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter,
            "--speculative-num-draft-tokens", str(block_size),
        ]  # fmt: skip
    spec = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return ["--speculative-config", json.dumps(spec)]


@dataclass(frozen=True)
class Chat:
    """A conversation as a client sends it, our template's variables, and the prompt that was trained on."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    prompt_ids: list[int]


def _chats(cfg: RunConfig, prompts: list[dict[str, Any]]) -> list[Chat]:
    """Of these prompts, those whose conversations are in the run's folder. The files they came from need
    not be there any more.
    """
    manifest = manifests.read(prepare.folder(cfg))
    if manifest is None:
        return []
    rows = {row["sample_id"]: row for row in tables.read_rows(prepare.folder(cfg), manifest)}
    tokenizer, kwargs, out = load_tokenizer(cfg.target), cfg.tokenize.template_kwargs, []
    for prompt in prompts:
        row = rows.get(prompt["sample_id"])
        if row is None:
            continue  # a later turn's row: behind the target's own answers, which no client sends
        messages = json.loads(row["messages"])
        if cfg.tokenize.turns == "all":
            messages = messages[: next(iter(places(messages, "all")), None)]
        tools = json.loads(row["tools"]) if row["tools"] else None
        messages = as_served(tokenizer, messages, tools, kwargs, where=prepare.place(cfg, row))
        out.append(Chat(messages, tools, kwargs, prompt["prompt_ids"]))
    return out


def _ask(
    client: Client, prompts: list[dict[str, Any]], eos: list[int], chats: list[Chat]
) -> tuple[list[Answer], dict[str, Any]]:
    """Every prompt, to the length that evaluate's answer had."""
    lengths = [len(prompt["methods"]["ar"]["tokens"]) for prompt in prompts]
    client.complete(prompts[0]["prompt_ids"], lengths[0], eos)  # warm up
    answers, begun = [], time.monotonic()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        answers.append(client.complete(prompt["prompt_ids"], length, eos))
        if time.monotonic() - begun > 10 or i + 1 == len(prompts):
            begun = time.monotonic()
            print(f"  {i + 1}/{len(prompts)} prompts", flush=True)
    return answers, {"server": client.name, "template": _template(client, chats)}


def _template(client: Client, chats: list[Chat]) -> str:
    """Whether the server's chat endpoint makes the prompts that were trained on: as a client sends
    them, or only with our template variables.
    """
    outcomes = set()
    for chat in chats:
        asked = [client.render(chat.messages, chat.tools, its) for its in ({}, chat.kwargs)]
        if None in asked:
            return "not checked"
        same = [ids == chat.prompt_ids for ids in asked]
        outcomes.add("same" if same[0] else "same with our variables" if same[1] else "differs")
    for worst in ("differs", "same with our variables"):
        if worst in outcomes:
            return worst
    return "same" if outcomes else "not checked"


def near_tie(command: str | None) -> float:
    """The top-2 gap under which a server may choose either token. It is the server's rounding that
    counts, whatever dtype the target is loaded in here: bf16 unless its command asks for another.
    """
    asked = re.search(r"--dtype[ =](float32|float)\b", command or "")
    return NEAR_TIES["float32" if asked else "bfloat16"]


def _diagnose(
    cfg: RunConfig,
    export: Path,
    result: dict[str, Any],
    prompts: list[dict[str, Any]],
    answers: list[Answer],
    reference: list[list[int]],
    differing: list[int],
    tie: float,
) -> None:
    """Load the target here: how near a tie the texts part, and which mistake, if any, fits the
    rounds that each prompt took better than the drafter as trained. Pooled tau alone would hide a
    small one.
    """
    model = load_target(cfg.target)
    tokenizer: Any = load_tokenizer(cfg.target)
    drafter = load_drafter(export, dtype=model.dtype, device=model.device).share(*unembed(model))
    taps = list(drafter.shape.taps)
    result["gaps"] = {}
    for i in differing:
        prompt, text = prompts[i]["prompt_ids"], reference[i]
        at = compare.first_difference(answers[i].tokens, text)
        _, logits = mismatches.states_of(model, taps, prompt + text[:at])
        top = logits[-1].topk(2).values.tolist()
        result["gaps"][str(i)] = {"token": at, "gap": top[0] - top[1], "tie": tie}
    acceptance = result["acceptance"]
    if "fault" in acceptance:
        return
    print("serve-check: replaying the served texts, as trained and with known mistakes", flush=True)
    texts = []
    for prompt, answer in list(zip(prompts, answers, strict=True))[:DIAGNOSED]:
        ids = prompt["prompt_ids"] + answer.tokens
        states, _ = mismatches.states_of(model, taps, ids)
        texts.append(mismatches.Text(ids, len(prompt["prompt_ids"]), answer.rounds, states))
    own = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
    named = {*own, tokenizer.unk_token_id, 0, len(tokenizer), drafter.shape.vocab_size - 1}
    near = {drafter.shape.mask_token_id + d for d in (-1, 1)}
    suspects = sorted(
        i for i in named | near if i is not None and 0 <= i < drafter.shape.vocab_size
    )
    acceptance["fits"] = mismatches.explain(mismatches.known(drafter, suspects), texts)
    acceptance["named"] = mismatches.verdict(acceptance["fits"])
