"""`draftsmith watch RUN ...`: runs as they go on, in the terminal."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftsmith.monitor import now
from draftsmith.monitor.history import History

EVERY_S = 0.5
COLOURS = {"DONE": "green", "FAILED": "red", "STALLED": "yellow", "STOPPED": "yellow", "QUEUED": "cyan",
           "UNKNOWN": "red"}  # fmt: skip
BLOCKS = "".join(chr(0x2581 + k) for k in range(8))
PLAIN = "_.-:=+*#"


def watch(roots: list[Path]) -> dict[str, Any]:
    """Show them until all have ended or Ctrl-C; the state of the first that did not end well, or of the
    last. Where nobody can look (a pipe), a line each time one changes.
    """
    histories = [History(root) for root in roots]
    for history in histories:
        now.read(history.root)  # no such run is told at once
    console = Console()
    if not console.is_terminal:
        return _lines(histories)
    with Live(console=console, screen=False, auto_refresh=False) as live:
        while True:
            boards = [history.board() for history in histories]
            live.update(Group(*(panel(board, console) for board in boards)), refresh=True)
            if all(over(board) for board in boards):
                return _worst(boards)
            time.sleep(EVERY_S)


def _lines(histories: list[History]) -> dict[str, Any]:
    shown: dict[str, str] = {}
    while True:
        boards = [history.board() for history in histories]
        for board in boards:
            if shown.get(board["run"]) != board["line"]:
                shown[board["run"]] = board["line"]
                print(f"{board['name']}: {board['line']}", flush=True)
        if all(over(board) for board in boards):
            return _worst(boards)
        time.sleep(EVERY_S)


def over(board: dict[str, Any]) -> bool:
    """Whether nothing more will happen by itself."""
    return board["state"]["state"] in (*now.ENDED, "UNKNOWN")


def _worst(boards: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [b["state"] for b in boards if b["state"]["state"] != "DONE"]
    return (bad or [boards[-1]["state"]])[0]


def panel(board: dict[str, Any], console: Console) -> Panel:
    """A run."""
    state = board["state"]
    colour = COLOURS.get(state["state"], "blue")
    body: list[Any] = []
    if state.get("total"):
        body.append(_progress(state, console.width))
    if board["stages"]:
        body.append(_stages(board))
    body += _curves(board, console)
    if state.get("gpus"):
        body.append(_gpus(state))
    if "workers" in state:
        body.append(Text(_machine(state), style="dim"))
    if state["failure"]:
        failure = state["failure"]
        body.append(Text(f"{failure['category']}: {failure['cause']}", style=f"bold {colour}"))
        body.append(Text(failure["remedy"]))
    body += [_event(event) for event in board["recent"][-6:]]
    title = f"[bold]{board['name']}[/]  [{colour} bold]{state['state']}[/]  {state['stage']}"
    return Panel(Group(*body), title=title, title_align="left", border_style=colour)


def _progress(state: dict[str, Any], width: int) -> Table:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    said = f"{state['done']:,}/{state['total']:,} {state['unit']}"
    if state["rate"]:
        said += f"  {state['rate']:,.1f}/s"
    if state["eta_s"] is not None and state["state"] not in now.ENDED:
        said += f"  ETA {now.clock(state['eta_s'])}"
    row.add_row(ProgressBar(total=state["total"], completed=state["done"]), said)
    return row


def _stages(board: dict[str, Any]) -> Text:
    marks = {"done": ("ok", "green"), "working": ("..", "blue"), "failed": ("!!", "red")}
    text = Text()
    for stage in board["stages"]:
        mark, colour = marks.get(stage["state"], ("--", "yellow"))
        took = (stage["ended_at"] or time.time()) - stage["begun_at"]
        text.append(f"{stage['name']} ", style=colour)
        text.append(f"{mark} {now.clock(took)}   ", style="dim")
    return text


def _curves(board: dict[str, Any], console: Console) -> list[Text]:
    out = []
    utf8 = (console.encoding or "").lower().startswith("utf")
    for name, points in board["curves"].items():
        if len(points) > 1:
            values = [y for _, y in points]
            drawn = spark(values, max(console.width - 46, 10), BLOCKS if utf8 else PLAIN)
            low, high, last = min(values), max(values), values[-1]
            out.append(
                Text(f"{name:<13}{drawn} {last:.4g} ({low:.4g} to {high:.4g})", no_wrap=True)
            )
    return out


def spark(values: list[float], width: int, marks: str) -> str:
    """A curve in one line of characters."""
    share = max(len(values) / width, 1)
    kept = [
        values[min(int((k + 1) * share) - 1, len(values) - 1)]
        for k in range(min(width, len(values)))
    ]
    low, high = min(kept), max(kept)
    scale = (len(marks) - 1) / (high - low) if high > low else 0
    return "".join(marks[round((value - low) * scale)] for value in kept)


def _gpus(state: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for gpu in state["gpus"]:
        used, total = gpu["used_bytes"] / 2**30, gpu["total_bytes"] / 2**30
        use = "" if gpu["use"] is None else f"{100 * gpu['use']:.0f}% busy"
        table.add_row(f"gpu{gpu['index']}", f"{used:.1f}/{total:.0f} GiB", use, gpu["name"])
    return table


def _machine(state: dict[str, Any]) -> str:
    parts = [f"{one['role']} {one['pid']}" for one in state["workers"][:12]]
    if len(state["workers"]) > 12:
        parts.append(f"and {len(state['workers']) - 12} more")
    said = f"on {state['workers'][0]['host']}: {', '.join(parts)}"
    if state.get("disk_free_bytes") is not None:
        said += f"; {state['disk_free_bytes'] / 1e9:,.1f} GB of disk free"
    if supervisor := state.get("supervisor"):
        said += f"; {supervisor['restarts']} restarts"
    return said


def _event(event: dict[str, Any]) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return Text(f"{at}  {event['stage']:<11}{event['text']}", style="dim", no_wrap=True)
