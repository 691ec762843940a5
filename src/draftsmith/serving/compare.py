"""Served acceptance and text against what `evaluate` measured on the same prompts."""

import io
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from draftsmith.drafter.config import DrafterShape
from draftsmith.metrics import bootstrap_tau
from draftsmith.serving.client import Answer

TAU_WITHIN, SLOT_WITHIN = 0.03, 0.03


def numbers(answers: list[Answer]) -> dict[str, Any]:
    """A server's run in the words of report.json."""
    tokens = [len(a.tokens) - 1 for a in answers]  # the prefill's belongs to no round
    rounds = [a.rounds or n for a, n in zip(answers, tokens, strict=True)]
    total = sum(a.rounds for a in answers)
    by_slot = [a.accepted_by_slot for a in answers if a.accepted_by_slot]
    seconds = sum(a.seconds for a in answers)
    return {
        "tau_pooled": sum(tokens) / max(1, sum(rounds)),
        "tau_ci95": bootstrap_tau(np.array(tokens), np.array(rounds)),
        "survival": [sum(slot) / total for slot in zip(*by_slot, strict=True)] if total else [],
        "drafted_per_round": sum(a.drafted for a in answers) / total if total else 0.0,
        "tokens_per_s": sum(len(a.tokens) for a in answers) / seconds,
        "rounds": total,
        "answers": [asdict(a) for a in answers],
    }


def measured(traces: list[dict[str, Any]], block_size: int) -> dict[str, Any]:
    """evaluate's run of the same prompts, from its traces."""
    tokens = [sum(t["emitted"]) for t in traces]
    rounds = [len(t["emitted"]) for t in traces]
    accepted = [a for t in traces for a in t["accepted"]]
    return {
        "tau_pooled": sum(tokens) / max(1, sum(rounds)),
        "tau_ci95": bootstrap_tau(np.array(tokens), np.array(rounds)),
        "survival": [
            sum(a >= k for a in accepted) / max(1, len(accepted)) for k in range(1, block_size)
        ],
        "tokens_per_s": sum(len(t["tokens"]) for t in traces)
        / max(1e-9, sum(t["decode_s"] for t in traces)),
        "rounds": sum(rounds),
    }


def judge(runs: dict[str, Any], shape: DrafterShape) -> dict[str, Any]:
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


def differing(texts: list[list[int]], reference: list[list[int]]) -> list[int]:
    """Positions of the texts that are not the same."""
    return [i for i, (a, b) in enumerate(zip(texts, reference, strict=True)) if a != b]


def first_difference(a: list[int], b: list[int]) -> int:
    """Where two texts part."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def text_summary(
    texts: dict[str, list[list[int]]], reference: str, gaps: dict[str, Any]
) -> dict[str, Any]:
    """Texts with the drafter against those without; where they part, a near tie or a mismatch."""
    count = len(texts["drafter"])
    near = sum(gap["gap"] <= gap["tie"] for gap in gaps.values())
    return {
        "reference": reference,
        "num_prompts": count,
        "identical": count - len(gaps),
        "near_ties": near,
        "mismatches": len(gaps) - near,
        "differences": gaps,
        "identical_to_evaluate": count - len(differing(texts["drafter"], texts["evaluate"])),
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What is wrong, a sentence each."""
    found, acceptance, text = [], result["acceptance"], result["text"]
    named = acceptance.get("named")
    if "fault" in acceptance:
        found.append(acceptance["fault"])
    elif named or not acceptance["agrees"]:
        said = f"served tau is {acceptance['tau_ratio']:.2f} of evaluate's"
        found.append(
            f"{said}: {named['name']} fits; {named['advice']}"
            if named
            else f"{said}, and no known mismatch fits"
        )
    if text["mismatches"]:
        found.append(
            f"{text['mismatches']} texts differ beyond near ties from {text['reference']}'s"
        )
    if result["template"] == "differs":
        found.append("the server's chat template makes other prompts than those trained on")
    elif result["template"] == "same with our variables":
        found.append(
            "thinking flag: the server's chat endpoint makes the trained prompts only with "
            "tokenize.template_kwargs; clients must send them as chat_template_kwargs"
        )
    return found


def table(result: dict[str, Any]) -> str:
    """The comparison for a terminal."""
    grid = Table(title=f"{result['server']}: {result['text']['num_prompts']} held-out prompts")
    for column in ("run", "tau", "95% interval", "survival by slot", "tokens/s"):
        grid.add_column(column)
    for name, run in result["runs"].items():
        low, high = run["tau_ci95"]
        survival = " ".join(f"{x:.2f}" for x in run["survival"]) or "-"
        grid.add_row(
            name,
            f"{run['tau_pooled']:.3f}",
            f"{low:.2f}-{high:.2f}",
            survival,
            f"{run['tokens_per_s']:.0f}",
        )
    console = Console(width=120, file=io.StringIO())
    console.print(grid)
    text = result["text"]
    lines = [
        f"text with the drafter: {text['identical']}/{text['num_prompts']} identical to "
        f"{text['reference']}'s, {text['near_ties']} near ties, {text['mismatches']} mismatches",
        f"chat template: {result['template']}",
    ]
    return console.file.getvalue() + "\n".join(lines)  # type: ignore[attr-defined]
