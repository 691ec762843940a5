"""How an evaluation looks: a table for the terminal, report.html with pictures, one file without
outside resources.
"""

import html
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
COLORS = {
    "ar": "#888888",
    "lookup": "#c98a1b",
    "chain": "#1b6fc9",
    "tree": "#2a9d5c",
    "untrained": "#b0b0b0",
    "shuffled": "#8e5bb5",
}


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
            f"{report['settings']['compute_dtype']} on {report['settings']['device']}"
        )
        for i, column in enumerate(COLUMNS):
            shown.add_column(column, justify="left" if i in (0, 3) else "right")
        for row in rows(suite):
            shown.add_row(*row)
        console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def markdown(report: dict[str, Any]) -> str:
    """For a README or a model card."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(
        lines + ["| " + " | ".join(row) + " |" for suite in report["suites"] for row in rows(suite)]
    )


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


def render_html(report: dict[str, Any], losses: list[dict[str, float]]) -> str:
    """The whole page; figures are inline SVG."""
    suite = report["suites"][0]
    head = "".join(f"<th>{html.escape(c)}</th>" for c in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(suite)
    )
    examples = "".join(
        f"<h3>Prompt</h3><pre>{html.escape(e['prompt'])}</pre><h3>Answer</h3><pre>{html.escape(e['answer'])}</pre>"
        for e in suite["examples"]
    )
    facts = {
        "target": report["target"]["model"],
        "drafter": json.dumps(report["drafter"]),
        "settings": json.dumps(report["settings"]),
    }
    listed = "".join(f"<dt>{k}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>draftsmith: {html.escape(report["run"])}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;margin:1rem auto;max-width:60rem;padding:0 1rem;color:#222}}
table{{border-collapse:collapse;font-size:14px}}
td,th{{border-bottom:1px solid #ddd;padding:.3rem .6rem;text-align:left}}
.wide{{overflow-x:auto}}
svg{{max-width:100%;height:auto}}pre{{background:#f5f5f5;padding:.6rem;overflow-x:auto}}dd{{overflow-wrap:anywhere}}</style>
<h1>{html.escape(report["run"])}</h1>
<p>{suite["num_prompts"]} held-out prompts. tau is tokens emitted per target call: accepted drafts + 1.</p>
<div class="wide"><table><tr>{head}</tr>{body}</table></div>
<h2>Tokens a round</h2>{_svg(_draw_histogram, suite["methods"])}
<h2>Survival by slot</h2>{_svg(_draw_survival, suite["methods"])}
<h2>Training loss</h2>{_svg(_draw_losses, losses) if losses else "<p>No training steps were recorded.</p>"}
<h2>Examples</h2>{examples}<h2>Settings</h2><dl>{listed}</dl></html>
"""


def _svg(draw: Any, data: Any) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    draw(figure.subplots(), data)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw_histogram(axes: Any, methods: dict[str, Any]) -> None:
    shown = [name for name in methods if name != "ar"]
    width = 0.8 / max(1, len(shown))
    for i, name in enumerate(shown):
        counts = methods[name]["histogram"]
        total = max(1, sum(counts))
        axes.bar(
            [k + (i - (len(shown) - 1) / 2) * width for k in range(1, len(counts))],
            [c / total for c in counts[1:]],
            width=width,
            label=name,
            color=COLORS[name],
        )
    axes.set(xlabel="tokens emitted in a round", ylabel="share of rounds")
    axes.legend()


def _draw_survival(axes: Any, methods: dict[str, Any]) -> None:
    for name, m in methods.items():
        if name != "ar":
            axes.plot(
                range(1, len(m["survival"]) + 1),
                m["survival"],
                marker="o",
                label=name,
                color=COLORS[name],
            )
    axes.set(xlabel="slot", ylabel="share of rounds that accept it", ylim=(0, 1))
    axes.legend()


def _draw_losses(axes: Any, losses: list[dict[str, float]]) -> None:
    axes.plot(
        [e["step"] for e in losses],
        [e["loss"] for e in losses],
        color=COLORS["chain"],
        label="loss",
    )
    axes.set(xlabel="step", ylabel="loss (nats, slot-weighted)")
    other = axes.twinx()
    other.plot(
        [e["step"] for e in losses],
        [e["anchor_tau"] for e in losses],
        color=COLORS["lookup"],
        label="tau over anchors",
    )
    other.set_ylabel("1 + leading correct slots, over anchors")
    axes.figure.legend(loc="upper right")
