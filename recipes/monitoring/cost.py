"""What watching costs a stage: seconds of its main thread inside the report's calls, CPU seconds of the report's
own thread, and CPU seconds of a supervisor and of a page beside it; each as a share of the stage's time.

    python recipes/monitoring/cost.py CONFIG STAGE [--section.key VALUE ...]

CONFIG's run must be done up to that stage, which is made here. Prints one JSON object.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith import cli, configfile, pipeline
from draftsmith.monitor import state

TICKS = 100.0  # a second, of /proc


class Clock:
    """Seconds spent in the report's calls by the thread that works, and in its own thread."""

    calls_s = own_s = 0.0

    def count(self, name: str) -> None:
        real = getattr(state.StageReport, name)

        def counted(report: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return real(report, *args, **kwargs)
            finally:
                self.calls_s += time.perf_counter() - begun

        setattr(state.StageReport, name, counted)

    def count_beat(self) -> None:
        real = state.StageReport.beat

        def counted(report: Any, stop: Any) -> None:
            begun = time.thread_time()
            real(report, stop)
            self.own_s += time.thread_time() - begun

        state.StageReport.beat = counted


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    path, stage, *rest = sys.argv[1:]
    cfg = configfile.load(Path(path), cli._split(rest)[1])
    clock = Clock()
    for name in ("progress", "event", "tick"):
        clock.count(name)
    clock.count_beat()
    words = [sys.executable, "-m", "draftsmith.cli", "watch", str(cfg.root)]
    viewers = {
        "terminal": subprocess.Popen(
            ["script", "-qfc", " ".join(words), "/dev/null"], stdout=subprocess.DEVNULL
        ),
        "page": subprocess.Popen([*words, "--web", "0"], stdout=subprocess.PIPE, text=True),
    }
    address = viewers["page"].stdout.readline().strip()
    reader = subprocess.Popen(["curl", "-sN", address + "events"], stdout=subprocess.DEVNULL)
    time.sleep(5)  # they have begun
    before = {name: cpu_s(viewer.pid) for name, viewer in viewers.items()}
    begun = time.perf_counter()
    pipeline.run(cfg, [stage])
    took = time.perf_counter() - begun
    said = {"stage": stage, "seconds": round(took, 1)}
    said["calls in the working thread"] = share(clock.calls_s, took)
    said["the report's own thread"] = share(clock.own_s, took)
    for name, viewer in viewers.items():
        if viewer.poll() is None:
            said[f"a viewer: {name}"] = share(cpu_s(viewer.pid) - before[name], took)
    for process in (*viewers.values(), reader):
        process.kill()
    print(json.dumps(said, indent=1))


def share(seconds: float, took: float) -> str:
    return f"{seconds:.3f} s, {100 * seconds / took:.3f}%"


if __name__ == "__main__":
    main()
