"""report.html: every suite's table and pictures, one file without outside resources, readable on a
phone.
"""

import html
import io
import json
from typing import Any

from draftsmith.report import COLUMNS, rows

COLORS = {
    "ar": "#888888",
    "lookup": "#c98a1b",
    "mtp": "#c0452e",
    "chain": "#1b6fc9",
    "tree": "#2a9d5c",
    "untrained": "#b0b0b0",
    "shuffled": "#8e5bb5",
}
STYLE = """body{font:16px/1.5 system-ui,sans-serif;margin:1rem auto;max-width:64rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:14px}
td,th{border-bottom:1px solid #ddd;padding:.3rem .6rem;text-align:left}
.wide{overflow-x:auto}
.pictures{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 20rem;max-width:31rem}
svg{width:100%;height:auto}pre{background:#f5f5f5;padding:.6rem;overflow-x:auto}dd{overflow-wrap:anywhere}"""


def render_html(report: dict[str, Any], losses: list[dict[str, float]]) -> str:
    """The whole page; figures are inline SVG."""
    facts = {
        "target": report["target"]["model"],
        "drafter": json.dumps(report["drafter"]),
        "settings": json.dumps(report["settings"]),
    }
    listed = "".join(f"<dt>{k}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items())
    suites = "".join(_suite(suite) for suite in report["suites"])
    training = (
        _figure("Training loss", _draw_losses, losses)
        if losses
        else "<p>No training steps were recorded.</p>"
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>draftsmith: {html.escape(report["run"])}</title>
<style>{STYLE}</style>
<h1>{html.escape(report["run"])}</h1>
<p>tau is tokens emitted per target call: accepted drafts + 1. Intervals are over prompts.</p>
{suites}<h2>Training</h2><div class="pictures">{training}</div><h2>Settings</h2><dl>{listed}</dl></html>
"""


def _suite(suite: dict[str, Any]) -> str:
    methods = suite["methods"]
    head = "".join(f"<th>{html.escape(c)}</th>" for c in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(suite)
    )
    drafted = {name: m for name, m in methods.items() if name != "ar"}
    pictures = [
        ("Tokens a round", _draw_histogram, drafted),
        ("Survival by slot", _draw_survival, drafted),
        ("tau by position in the answer", _draw_positions, drafted),
        ("Where a round's time goes", _draw_shares, methods),
    ]
    if len(next(iter(methods.values()))["by_domain"]) > 1:
        pictures.append(("tau by domain", _draw_domains, drafted))
    drawn = "".join(_figure(*picture) for picture in pictures) if drafted else ""
    examples = "".join(
        f"<h4>Prompt</h4><pre>{html.escape(e['prompt'])}</pre><h4>Answer</h4><pre>{html.escape(e['answer'])}</pre>"
        for e in suite["examples"]
    )
    return f"""<h2>{html.escape(suite["name"])}: {suite["num_prompts"]} prompts</h2>
<div class="wide"><table><tr>{head}</tr>{body}</table></div>
<div class="pictures">{drawn}</div>
<details><summary>Examples</summary>{examples}</details>
"""


def _figure(title: str, draw: Any, data: Any) -> str:
    return f"<figure><figcaption>{title}</figcaption>{_svg(draw, data)}</figure>"


def _svg(draw: Any, data: Any) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    draw(figure.subplots(), data)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw_histogram(axes: Any, methods: dict[str, Any]) -> None:
    shown = list(methods)
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
        slots = range(1, len(m["survival"]) + 1)
        axes.plot(slots, m["survival"], marker="o", label=name, color=COLORS[name])
    axes.set(xlabel="slot", ylabel="share of rounds that accept it", ylim=(0, 1))
    axes.legend()


def _draw_positions(axes: Any, methods: dict[str, Any]) -> None:
    for name, m in methods.items():
        mine = {str(p["from"]): p["tau"] for p in m["by_position"]}
        axes.plot(list(mine), list(mine.values()), marker="o", label=name, color=COLORS[name])
    axes.set(xlabel="round begins after so many tokens", ylabel="tau", ylim=(0, None))
    axes.legend()


def _draw_domains(axes: Any, methods: dict[str, Any]) -> None:
    width = 0.8 / len(methods)
    for i, (name, m) in enumerate(methods.items()):
        taus = [domain["tau_pooled"] for domain in m["by_domain"].values()]
        at = [k + (i - (len(methods) - 1) / 2) * width for k in range(len(taus))]
        axes.barh(at, taus, height=width, label=name, color=COLORS[name])
    labels = [name[:24] or "-" for name in next(iter(methods.values()))["by_domain"]]
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="tau")
    axes.legend()


def _draw_shares(axes: Any, methods: dict[str, Any]) -> None:
    begin = [0.0] * len(methods)
    for part, color in (("draft", "#1b6fc9"), ("verify", "#888888"), ("commit", "#c98a1b")):
        shares = [m["shares"][part] for m in methods.values()]
        axes.barh(list(methods), shares, left=begin, label=part, color=color)
        begin = [b + s for b, s in zip(begin, shares, strict=True)]
    axes.set(xlabel="share of decoding time", xlim=(0, 1))
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
