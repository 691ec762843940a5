"""A plan for people: tables, and the reason for the source in a sentence."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.plan.rates import UNITS
from draftsmith.source import amount


def text(plan: dict[str, Any]) -> str:
    """All of it."""
    out = io.StringIO()
    console = Console(width=110, file=out)
    work, machine, target = plan["work"], plan["machine"], plan["target"]
    gpus = f"{machine['gpus']} GPUs of {amount(machine['memory_bytes'])}"
    gpus += f" on {machine['nodes']} nodes" if machine["nodes"] > 1 else ""
    disk = machine["disk_bytes"]
    console.print(
        f"{work['samples']:,} samples, {work['tokens']:,} tokens ({work['mean_tokens']:,.0f} a sample; "
        f"{work['source']})\n"
        f"{gpus if machine['gpus'] else 'CPU, ' + amount(machine['memory_bytes'])}; "
        f"{'no bound on' if disk is None else amount(disk) + ' free at'} {plan['store']['place']} "
        f"({machine['source']})\n"
        f"target {count(target['params'])} parameters, {count(target['params_for_features'])} up to the "
        f"last tap of {target['taps']}; drafter {count(plan['drafter']['params'])}\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_stages(plan))
    console.print(_bytes(plan))
    console.print(_checkpoints(plan["checkpoints"]), highlight=False, soft_wrap=True)
    console.print(_rates(plan))
    source = plan["source"]
    console.print(
        f"features.source: {source['source']} because {source['reason']}. "
        f"In all {time(plan['hours'])} (stages marked *){_cost(plan)}.",
        highlight=False,
        soft_wrap=True,
    )
    if plan["scaling"]:
        console.print(_scaling(plan))
    for stage in plan["stages"]:
        if stage["taken"] and not stage["fits"]:
            console.print(
                f"{stage['name']} needs {amount(stage['memory_bytes'])} of a GPU's "
                f"{amount(machine['memory_bytes'])}: {stage['note']}.",
                highlight=False,
                soft_wrap=True,
            )
    return out.getvalue().rstrip()


def _stages(plan: dict[str, Any]) -> Table:
    grid = Table()
    for column in ("", "stage", "time", "memory a GPU", "fits", ""):
        grid.add_column(column)
    for stage in plan["stages"]:
        grid.add_row(
            "*" if stage["taken"] else "", stage["name"], time(stage["hours"]),
            amount(stage["memory_bytes"]), "yes" if stage["fits"] else "no", stage["note"],
        )  # fmt: skip
    return grid


def _cost(plan: dict[str, Any]) -> str:
    if plan["cost"] is None:
        return ""
    return f", {plan['cost']:,.0f} at {plan['price']:g} a GPU-hour"


def _scaling(plan: dict[str, Any]) -> Table:
    """Predicted: what more of them bring, regenerate to train; and what decides."""
    grid = Table()
    names = [name for name in ("extract", "train") if name in plan["scaling"][0]]
    cost = ["cost"] if plan["price"] is not None else []
    stages = [column for name in names for column in (name, f"{name} is decided by")]
    for column in ("nodes", "GPUs", *stages, "in all but evaluate", "speed-up", "GPU-hours", *cost):
        grid.add_column(column)
    for line in plan["scaling"]:
        cells = [x for n in names for x in (time(line[n]["hours"]), line[n]["decides"])]
        cells += [time(line["hours"]), f"{line['speedup']:.2f}", f"{line['gpu_hours']:,.0f}"]
        cells += [f"{line['cost']:,.0f}"] if cost else []
        grid.add_row(str(line["nodes"]), str(line["gpus"]), *cells)
    return grid


def _bytes(plan: dict[str, Any]) -> Table:
    store, disk = plan["store"], plan["machine"]["disk_bytes"]
    grid = Table()
    for column in ("codec", "features", "a token", "fits the disk"):
        grid.add_column(column)
    for codec, size in store["bytes"].items():
        fits = "yes" if disk is None or size <= disk else "no"
        mark = " *" if codec == store["codec"] else ""
        grid.add_row(codec + mark, amount(size), f"{size / plan['work']['tokens']:,.0f} B", fits)
    return grid


def _checkpoints(of: dict[str, Any]) -> str:
    less = (
        ""
        if of["fits"]
        else (
            ": they do not fit; choose a `run:` on a larger disk, or fewer train.keep_checkpoints"
        )
    )
    return (
        f"checkpoints: {amount(of['bytes'])} at most at {of['place']}: {of['kept']} newest, the best and the "
        f"one being written, {amount(of['one'])} each; {amount(of['free'])} free there{less}\n"
    )


def _rates(plan: dict[str, Any]) -> Table:
    grid = Table()
    for column in ("rate", "value", "unit", "source"):
        grid.add_column(column)
    for name, rate in plan["rates"].items():
        grid.add_row(name, f"{rate['value']:.4g}", UNITS[name], rate["source"])
    return grid


def count(number: float) -> str:
    """1.73 B for 1,730,000,000."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def time(hours: float) -> str:
    """In hours, minutes or seconds."""
    if hours >= 1:
        return f"{hours:.1f} h" if hours < 100 else f"{hours:,.0f} h"
    return f"{hours * 60:.0f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"
