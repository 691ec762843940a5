"""What a viewer shows of a run: its state now, its stages, curves and last events. Reads state.json and
events.jsonl alone, and of the latter only what is new.
"""

import contextlib
import json
from collections import deque
from pathlib import Path
from typing import Any

from draftsmith.core import UserError
from draftsmith.monitor import now

RECENT = 40
POINTS = 600  # of a curve: more than a screen has
CURVES = {"step": ("loss", "tokens_per_s"), "verdict": ("tau", "tau_lookup")}
Curve = dict[int, float]
NO_EVENT = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What a line gives that a kill has cut short, or that nobody of ours wrote: it is passed over."""


class History:
    """A run as its events tell it; `board()` reads on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._begin()

    def _begin(self) -> None:
        self._read = 0
        self.stages: dict[str, dict[str, Any]] = {}
        self.curves: dict[str, Curve] = {name: {} for kinds in CURVES.values() for name in kinds}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def board(self) -> dict[str, Any]:
        """Everything worth showing, as plain data."""
        self._follow()
        try:
            state = now.read(self.root)
        except UserError as error:
            state = {"state": "UNKNOWN", "stage": "", "failure": None, "said": str(error)}
        if state["state"] in now.ENDED or state["state"] == "STALLED":
            for stage in self.stages.values():  # killed: it had no time to say so
                if stage["state"] == "working":
                    stage["state"] = state["state"].lower()
        return {
            "run": str(self.root),
            "name": self.root.absolute().name,
            "state": state,
            "line": now.line(state) if "workers" in state else state["said"],
            "stages": [
                {"name": name, **stage, "before": None} for name, stage in self.stages.items()
            ],
            "curves": {name: thinned(curve) for name, curve in self.curves.items() if curve},
            "recent": list(self.recent),
            "report": (self.root / "eval" / "report.html").is_file(),
        }

    def _follow(self) -> None:
        with contextlib.suppress(OSError), open(self.root / "events.jsonl", "rb") as file:
            if file.seek(0, 2) < self._read:  # the folder was made anew
                self._begin()
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._read += len(line)
                with contextlib.suppress(*NO_EVENT):
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind, stage, _ = event["kind"], event["stage"], float(event["at"])
        for name in CURVES.get(kind, ()):
            if isinstance(event.get(name), int | float):
                self.curves[name][int(event["step"])] = event[name]
        if stage in now.STAGES:
            self._stage(event)
        if kind == "working" and stage == "train":  # what a crash threw away is done again
            for curve in self.curves.values():
                for step in [step for step in curve if step > event["done"]]:
                    del curve[step]
        if text := told(event):
            self.recent.append({"at": event["at"], "stage": stage, "kind": kind, "text": text})

    def _stage(self, event: dict[str, Any]) -> None:
        kind, at = event["kind"], event["at"]
        stage = self.stages.setdefault(
            event["stage"], {"begun_at": at, "ended_at": None, "state": ""}
        )
        if kind == "start":
            before = {key: value for key, value in stage.items() if key != "before"}
            stage.update(begun_at=at, ended_at=None, state="working", before=before)
        elif kind == "working":
            stage.update(total=event["total"], unit=event["unit"], before={})
        elif kind in ("done", "queued", "failed", "stopped"):
            if (
                stage.get("before", {}).get("state") == "done"
            ):  # it was skipped, or refused: what was done stays
                stage.update(stage["before"])
            else:
                stage.update(ended_at=at, state="done" if kind == "queued" else kind)


def told(event: dict[str, Any]) -> str:
    """An event in words; empty for one that curves show."""
    kind = event["kind"]
    plain = {"start": "begins", "done": "done", "queued": "done", "stopped": "stopped"}
    if kind in plain:
        return plain[kind]
    if kind == "working":
        found = f", {event['done']:,} found done" if event["done"] else ""
        return f"{event['total']:,} {event['unit']}{found}" if event["total"] else "works"
    if kind == "step":
        return ""
    if kind == "verdict":
        return f"step {event['step']}: held-out tau {event['tau']:.2f}"
    if kind == "restart":
        return f"restart {event['number']} in {event['wait_s']:.0f} s: {event['cause']}"
    if kind in ("failed", "stalled"):
        return f"{kind}: {event['cause']}"
    rest = {key: value for key, value in event.items() if key not in ("at", "stage", "kind")}
    return f"{kind} " + " ".join(f"{key}={value}" for key, value in rest.items())[:300]


def thinned(curve: Curve) -> list[tuple[int, float]]:
    """At most POINTS points: evenly chosen, the last one kept."""
    points = sorted(curve.items())
    step = -(-len(points) // POINTS)
    return points[::-1][:: max(step, 1)][::-1]
