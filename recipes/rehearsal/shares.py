"""Where a run's time went, by its events:  python recipes/rehearsal/shares.py RUN"""

import json
import sys
from pathlib import Path
from typing import Any


def shares(run: Path) -> dict[str, Any]:
    """Seconds of each stage at work and at its start, over all tries, and of each part of training's starts; of
    its steps after the first ten the rate and the share waited for features, and the highest memory.
    """
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    stages: dict[str, dict[str, float]] = {}
    begun = gone_on = 0
    for event, after in zip(events, [*events[1:], None], strict=True):
        stage = stages.setdefault(event["stage"], {"starting_s": 0.0, "working_s": 0.0})
        if event["stage"] == "run":
            continue
        if event["kind"] == "start":
            begun = event["at"]
        until = after["at"] if after and after["stage"] == event["stage"] else event["at"]
        loading = event["kind"] == "start"
        stage["starting_s" if loading else "working_s"] += round(until - event["at"], 3)
        if event["stage"] == "train" and event["kind"] == "working":
            gone_on = event["done"] or gone_on
    assert begun, "a run that has begun"
    stages.pop("run", None)
    loading: dict[str, list[float]] = {}
    for event in events:
        if event["kind"] == "loaded":
            loading.setdefault(event["what"], []).append(event["seconds"])
    steps = [event for event in events if event["kind"] == "step"]
    late = steps[10:] or steps
    seconds = [event["tokens"] / event["tokens_per_s"] for event in late]

    def mean(name: str) -> float:
        return sum(s * event.get(name, 0.0) for s, event in zip(seconds, late, strict=True)) / sum(
            seconds
        )

    whole = sum(sum(stage.values()) for stage in stages.values())
    return {
        "gone_on_from_step": gone_on,
        "stages": stages,
        "loading": loading,
        "shares": {name: round(sum(stage.values()) / whole, 4) for name, stage in stages.items()},
        "steps": len({event["step"] for event in steps}),
        "tokens_per_s": mean("tokens_per_s"),
        "data_wait": mean("data_wait"),
        "of_ceiling": mean("of_ceiling") or None,
        "peak_gib": max((event.get("peak_gib", 0.0) for event in steps), default=0.0) or None,
        "losses": [round(steps[0]["loss"], 4), round(steps[-1]["loss"], 4)],
    }


if __name__ == "__main__":
    print(json.dumps(shares(Path(sys.argv[1])), indent=1))
