"""Where a loop's time goes, without making a GPU wait: events there, the clock on a CPU."""

import time
from collections import defaultdict
from typing import Any

import torch


class Laps:
    """Seconds by name: each mark() gives the time since the one before to a name."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """What was done since the last mark was `name`."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Waits for the last mark."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        out: dict[str, float] = defaultdict(float)
        for (_, before), (name, at) in zip(self._marks, self._marks[1:], strict=False):
            out[name] += before.elapsed_time(at) / 1e3 if self._on_gpu else at - before
        return out
