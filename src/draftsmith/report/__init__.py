"""How an evaluation looks: a table for the terminal and one for model cards; page.py draws report.html."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "method",
    "tau",
    "95% interval",
    "survival by slot",
    "target calls/token",
    "tokens/s",
    "speedup",
    "identical text",
)


def rows(suite: dict[str, Any]) -> list[list[str]]:
    """The table's cells, one row a method."""
    out = []
    for name, m in suite["methods"].items():
        low, high = m["tau_ci95"]
        survival = " ".join(f"{s:.2f}" for s in m["survival"]) if name != "ar" else "-"
        ties = f" ({m['near_ties']} near ties)" if m["near_ties"] else ""
        wrong = f" ({m['mismatches']} MISMATCHES)" if m["mismatches"] else ""
        out.append(
            [
                name,
                f"{m['tau_pooled']:.2f}",
                f"{low:.2f}-{high:.2f}",
                survival,
                f"{m['target_calls_per_token']:.2f}",
                f"{m['tokens_per_s']:.0f}",
                f"{m['speedup']:.2f}x",
                same_text(m, suite["num_prompts"]) + ties + wrong,
            ]
        )
    return out


def same_text(method: dict[str, Any], num_prompts: int) -> str:
    """How many texts equal the autoregressive ones; sampled ones are not compared."""
    return "sampled" if method["identical"] is None else f"{method['identical']}/{num_prompts}"


def table(report: dict[str, Any]) -> str:
    """For the terminal."""
    console = Console(file=io.StringIO(), width=132)
    for suite in report["suites"]:
        shown = Table(
            title=f"{suite['name']}: {suite['num_prompts']} prompts, block {report['drafter']['block_size']}, "
            f"batch {report['settings']['batch']}, {report['settings']['compute_dtype']} on "
            f"{report['settings']['device']}"
        )
        for i, column in enumerate(COLUMNS):
            shown.add_column(column, justify="left" if i in (0, 3) else "right")
        for row in rows(suite):
            shown.add_row(*row)
        console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def markdown(report: dict[str, Any]) -> str:
    """For a README or a model card: what was measured and how, and a table of every suite."""
    settings, drafter = report["settings"], report["drafter"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    kwargs = json.dumps(settings["template_kwargs"])
    trees = any("tree" in suite["methods"] for suite in report["suites"])
    budget = f"trees of {settings['tree_budget']} nodes, " if trees else ""
    lines = [
        f"{report['target']['model']}, block {drafter['block_size']}, {budget}{how}, at most "
        f"{settings['max_new_tokens']} new tokens, template variables `{kwargs}`, batch {settings['batch']}, "
        f"{settings['compute_dtype']}, {settings['device']}. tau is tokens emitted per target call "
        "(accepted drafts + 1), pooled over rounds, with its 95% interval over prompts; speedup is "
        "against the same loop's autoregressive run.",
        "",
        "| suite | prompts | method | tau | tau of requests | calls/token | tokens/s | speedup | identical |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for suite in report["suites"]:
        for name, m in suite["methods"].items():
            low, high = m["tau_ci95"]
            lines.append(
                f"| {suite['name']} | {suite['num_prompts']} | {name} | {m['tau_pooled']:.2f} "
                f"({low:.2f}-{high:.2f}) | {m['tau_mean']:.2f} | {m['target_calls_per_token']:.2f} "
                f"| {m['tokens_per_s']:.0f} | {m['speedup']:.2f}x "
                f"| {same_text(m, suite['num_prompts'])} |"
            )
    return "\n".join(lines) + "\n"


def read_losses(root: Path) -> list[dict[str, float]]:
    """The training steps that events.jsonl recorded. Training that began again, from a checkpoint
    or from nothing, replaces what was recorded after that point.
    """
    path = root / "events.jsonl"
    steps: dict[int, dict[str, float]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            event = json.loads(text)
        except json.JSONDecodeError:  # a line cut by kill -9
            continue
        if event["kind"] == "working" and event["stage"] == "train":
            steps = {step: kept for step, kept in steps.items() if step <= event["done"]}
        if event["kind"] == "step":
            steps[event["step"]] = event
    return [steps[step] for step in sorted(steps)]
