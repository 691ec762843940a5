"""`draftsmith serve-check`: the held-out prompts of a run through a real server with its export, and
without; what is accepted there compared with what `evaluate` measured, and the known mistake named
that fits when they differ.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith import configfile, evaluate, files, prepare, tables
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, UserError
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, read_shape
from draftsmith.drafter.config import DrafterShape
from draftsmith.metrics import bootstrap_tau
from draftsmith.serving import mismatches
from draftsmith.serving.client import Answer, Client, connect
from draftsmith.serving.launch import running
from draftsmith.target.load import eos_ids, load_target, load_tokenizer, unembed

TAU_WITHIN, SLOT_WITHIN = 0.03, 0.03
NEAR_TIE = 2**-6  # of the top logit: four bf16 roundings
DIAGNOSED = 32  # prompts replayed for the diagnosis


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
    out, eos = cfg.root / "serve", eos_ids(load_tokenizer(cfg.target), cfg.target)
    result: dict[str, Any] = {"format": "serve/1", "export": str(export), "runs": {}}
    answers: dict[str, list[Answer]] = {}
    for name, options in _servers(export, shape, server, command, baseline).items():
        print(f"serve-check: {name}", flush=True)
        if server:
            answers[name], about = _ask(connect(server), cfg, prompts, eos)
        else:
            assert command is not None, "one of the two is given"
            with running(command, options, out / f"{name}.log", wait_s=wait_s) as url:
                answers[name], about = _ask(connect(url), cfg, prompts, eos)
        result["server"] = about.pop("server")
        result.setdefault("template", about.pop("template"))
        result["runs"][name] = _numbers(answers[name], shape.block_size)
    measured = [prompt["methods"] for prompt in prompts]
    result["runs"]["evaluate"] = _measured([m["chain"] for m in measured], shape.block_size)
    texts = {name: [a.tokens for a in mine] for name, mine in answers.items()}
    texts["evaluate"] = [m["ar"]["tokens"] for m in measured]
    result["acceptance"] = _acceptance(result["runs"], shape)
    reference = "plain" if "plain" in texts else "evaluate"
    differing = _differing(texts["drafter"], texts[reference])
    if differing or not result["acceptance"]["agrees"]:
        _diagnose(cfg, export, result, prompts, answers["drafter"], texts[reference], differing)
    result["text"] = _text(texts, reference, result.get("gaps", {}))
    files.write_json(out / "report.json", result)
    print(json.dumps(result, indent=1) if as_json else _table(result))
    faults = _faults(result)
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
    prompts = json.loads(traces.read_text())
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


def _ask(
    client: Client, cfg: RunConfig, prompts: list[dict[str, Any]], eos: list[int]
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
    return answers, {"server": client.name, "template": _template(client, cfg, prompts)}


def _template(client: Client, cfg: RunConfig, prompts: list[dict[str, Any]]) -> str:
    """Whether the server's chat endpoint makes the prompts that were trained on: as a client sends
    them, or only with our template variables.
    """
    rows = {
        row["sample_id"]: row
        for row in tables.read_rows(prepare.folder(cfg), prepare.finished(cfg))
    }
    outcomes = set()
    for prompt in prompts[:8]:
        row = rows[prompt["sample_id"]]
        tools = json.loads(row["tools"]) if row["tools"] else None
        asked = [
            client.render(json.loads(row["messages"]), tools, kwargs)
            for kwargs in ({}, cfg.tokenize.template_kwargs)
        ]
        if None in asked:
            return "not checked"
        same = [ids == prompt["prompt_ids"] for ids in asked]
        outcomes.add("same" if same[0] else "same with our variables" if same[1] else "differs")
    for worst in ("differs", "same with our variables"):
        if worst in outcomes:
            return worst
    return "same"


def _numbers(answers: list[Answer], block_size: int) -> dict[str, Any]:
    tokens = [len(a.tokens) - 1 for a in answers]  # the prefill's belongs to no round
    rounds = [a.rounds or n for a, n in zip(answers, tokens, strict=True)]
    total = sum(a.rounds for a in answers)
    by_slot = [a.accepted_by_slot for a in answers if a.accepted_by_slot]
    seconds = sum(a.seconds for a in answers)
    return {
        "tau_pooled": sum(tokens) / max(1, sum(rounds)),
        "tau_ci95": bootstrap_tau(_array(tokens), _array(rounds)),
        "survival": [sum(slot) / total for slot in zip(*by_slot, strict=True)] if total else [],
        "drafted_per_round": sum(a.drafted for a in answers) / total if total else 0.0,
        "tokens_per_s": sum(len(a.tokens) for a in answers) / seconds,
        "rounds": total,
        "answers": [asdict(a) for a in answers],
    }


def _measured(traces: list[dict[str, Any]], block_size: int) -> dict[str, Any]:
    tokens = [sum(t["emitted"]) for t in traces]
    rounds = [len(t["emitted"]) for t in traces]
    accepted = [a for t in traces for a in t["accepted"]]
    return {
        "tau_pooled": sum(tokens) / max(1, sum(rounds)),
        "tau_ci95": bootstrap_tau(_array(tokens), _array(rounds)),
        "survival": [
            sum(a >= k for a in accepted) / max(1, len(accepted)) for k in range(1, block_size)
        ],
        "tokens_per_s": sum(len(t["tokens"]) for t in traces)
        / max(1e-9, sum(t["decode_s"] for t in traces)),
        "rounds": sum(rounds),
    }


def _array(values: list[int]) -> Any:
    return torch.tensor(values).numpy()


def _acceptance(runs: dict[str, Any], shape: DrafterShape) -> dict[str, Any]:
    """Served tau and survival against evaluate's on the same prompts."""
    served, ours = runs["drafter"], runs["evaluate"]
    if not served["rounds"]:
        return {"agrees": False, "fault": "the server made no drafts"}
    ratio = served["tau_pooled"] / ours["tau_pooled"]
    slots = [abs(a - b) for a, b in zip(served["survival"], ours["survival"], strict=False)]
    drafts = round(served["drafted_per_round"]) if served["drafted_per_round"] else None
    out: dict[str, Any] = {"tau_ratio": ratio, "largest_slot_difference": max(slots, default=None)}
    if drafts is not None and drafts != shape.block_size - 1:
        out["fault"] = (
            f"block size: the server drafts {drafts} tokens, the export's block gives "
            f"{shape.block_size - 1} (num_speculative_tokens)"
        )
    near = abs(ratio - 1) <= TAU_WITHIN and max(slots, default=0.0) <= SLOT_WITHIN
    return {**out, "agrees": near and "fault" not in out}


def _differing(texts: list[list[int]], reference: list[list[int]]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(texts, reference, strict=True)) if a != b]


def _diagnose(
    cfg: RunConfig,
    export: Path,
    result: dict[str, Any],
    prompts: list[dict[str, Any]],
    answers: list[Answer],
    reference: list[list[int]],
    differing: list[int],
) -> None:
    """Load the target here: how near a tie the texts part, and which mistake fits the acceptance."""
    model = load_target(cfg.target)
    tokenizer: Any = load_tokenizer(cfg.target)
    drafter = load_drafter(
        export, dtype=model.dtype, device=model.device, num_target_layers=None
    ).share(*unembed(model))
    taps = list(drafter.shape.taps)
    result["gaps"] = {}
    for i in differing:
        prompt, text = prompts[i]["prompt_ids"], reference[i]
        at = _first_difference(answers[i].tokens, text)
        _, logits = mismatches.states_of(model, taps, prompt + text[:at])
        top = logits[-1].topk(2).values.tolist()
        result["gaps"][str(i)] = {"token": at, "gap": top[0] - top[1], "top": top[0]}
    acceptance = result["acceptance"]
    if acceptance["agrees"] or "fault" in acceptance:
        return
    print("serve-check: acceptance differs; replaying known mistakes", flush=True)
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


def _first_difference(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _text(
    texts: dict[str, list[list[int]]], reference: str, gaps: dict[str, Any]
) -> dict[str, Any]:
    """Texts with the drafter against those without; where they part, a near tie or a mismatch."""
    count = len(texts["drafter"])
    near = sum(g["gap"] <= NEAR_TIE * abs(g["top"]) for g in gaps.values())
    return {
        "reference": reference,
        "num_prompts": count,
        "identical": count - len(gaps),
        "near_ties": near,
        "mismatches": len(gaps) - near,
        "differences": gaps,
        "identical_to_evaluate": count - len(_differing(texts["drafter"], texts["evaluate"])),
    }


def _faults(result: dict[str, Any]) -> list[str]:
    faults, acceptance, text = [], result["acceptance"], result["text"]
    if "fault" in acceptance:
        faults.append(acceptance["fault"])
    elif not acceptance["agrees"]:
        found = f"served tau is {acceptance['tau_ratio']:.2f} of evaluate's"
        named = acceptance.get("named")
        faults.append(
            f"{found}: {named['name']} fits; {named['advice']}"
            if named
            else f"{found}, and no known mismatch fits"
        )
    if text["mismatches"]:
        faults.append(
            f"{text['mismatches']} texts differ beyond near ties from {text['reference']}'s"
        )
    if result["template"] == "differs":
        faults.append("the server's chat template makes other prompts than those trained on")
    elif result["template"] == "same with our variables":
        faults.append(
            "thinking flag: the server's chat endpoint makes the trained prompts only with "
            "tokenize.template_kwargs; clients must send them as chat_template_kwargs"
        )
    return faults


def _table(result: dict[str, Any]) -> str:
    table = Table(title=f"{result['server']}: {result['text']['num_prompts']} held-out prompts")
    for column in ("run", "tau", "95% interval", "survival by slot", "tokens/s"):
        table.add_column(column)
    for name, run in result["runs"].items():
        low, high = run["tau_ci95"]
        survival = " ".join(f"{x:.2f}" for x in run["survival"]) or "-"
        table.add_row(
            name,
            f"{run['tau_pooled']:.3f}",
            f"{low:.2f}-{high:.2f}",
            survival,
            f"{run['tokens_per_s']:.0f}",
        )
    console = Console(width=120, record=True, quiet=True)
    console.print(table)
    text = result["text"]
    lines = [
        f"text with the drafter: {text['identical']}/{text['num_prompts']} identical to "
        f"{text['reference']}'s, {text['near_ties']} near ties, {text['mismatches']} mismatches",
        f"chat template: {result['template']}",
    ]
    return console.export_text() + "\n".join(lines)
