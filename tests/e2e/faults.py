"""A table of faults: what `status` says of each and after how long, and whether the run ends as undisturbed.

python tests/e2e/faults.py WORK [NAME ...]
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab import SUPERVISE, TRAIN, Run, Seen, left_over
from runs import environment

from draftsmith.monitor import processes

DEAD = ("QUEUED", "FAILED")
FAILED = ("FAILED",)


@dataclass
class Row:
    """`expected` is a pattern that the true cause must match."""

    said: Seen
    expected: str
    run: Run
    code: int
    """Of the command that ended the run."""
    again: bool = False
    """Whether a person had to give the command again."""
    undisturbed: Path | None = None
    """The run to compare with, where it is not the common one."""

    @property
    def named(self) -> bool:
        return re.search(self.expected, self.said.cause) is not None


Fault = Callable[[Path, Path], Row]


def after(run: Run, when: float, states: tuple[str, ...] = DEAD, **options: Any) -> Seen:
    """The first state among these that has a cause."""
    return run.until(lambda s: s["state"] in states and bool(s["failure"]), when, **options)


def planted(kind: str, expected: str) -> Fault:
    """A fault inside the worker's training, that the supervisor outlives."""

    def fault(before: Path, folder: Path) -> Row:
        run = Run(before, folder).start(f"{kind}@8")
        seen = after(run, run.harmed())
        return Row(seen, expected, run, run.end())

    return fault


def killed(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start()
    pid = run.training()["workers"][0]["pid"]
    seen = after(run, run.kill(pid))
    return Row(seen, r"killed by signal 9", run, run.end())


def supervisor_killed(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start()
    run.training()
    assert run.process is not None
    when = run.kill(run.process.pid)
    seen = run.until(lambda s: s["state"] == "STOPPED", when)
    while left_over(run.folder):
        time.sleep(0.1)
    return Row(seen, "", run, run.again(), again=True)


def stopped_by_command(before: Path, folder: Path) -> Row:
    run = Run(before, folder)
    words = [sys.executable, "-m", "draftsmith.cli"]
    options: dict[str, Any] = {"env": environment(), "check": True, "capture_output": True}
    subprocess.run([*words, "run", "--detach", str(run.config)], **options)
    run.training()
    begun = time.monotonic()
    subprocess.run([*words, "stop", str(run.root)], **options)
    seen = run.until(lambda s: s["state"] == "STOPPED", begun)
    assert not left_over(run.folder)
    kept = run.root / "checkpoints" / f"step-{seen.state['done']}"
    assert kept.is_dir(), "it stopped with a checkpoint of its last step"
    return Row(seen, "", run, run.again(), again=True)


def stuck(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start("hangs@8")
    seen = after(run, run.harmed(), ("STALLED",))
    return Row(seen, r"process \d+ \(main\) is in hangs", run, run.end())


def frozen(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start()
    pid = run.training()["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    seen = after(run, time.monotonic(), ("STALLED",))
    os.kill(pid, signal.SIGCONT)
    return Row(seen, rf"kill -CONT {pid}", run, run.end())


def not_finite(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start("not_finite@8")
    seen = after(run, run.harmed(), FAILED)
    code = run.end()
    assert code == 2, (code, run.said()[-3000:])
    return Row(seen, r"not finite: .*samples?", run, run.again(), again=True)


def rank_killed(before: Path, folder: Path) -> Row:
    run = Run(
        before, folder, train={**TRAIN, "processes": 2}, supervise={**SUPERVISE, "stall_s": 30.0}
    )
    run.start()
    run.training()
    assert run.process is not None
    ranks = [p for p in processes.descendants(run.process.pid) if _rank(p) == "1"]
    seen = after(run, run.kill(ranks[0]))
    code = run.end()
    alone = Run(before, folder.with_name(f"{folder.name}-alone"), train={**TRAIN, "processes": 2})
    assert alone.again() == 0, alone.said()
    cause = rf"rank 1, process {ranks[0]}, died \(signal 9"
    return Row(seen, cause, run, code, undisturbed=alone.root)


def _rank(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((w.decode()[5:] for w in words if w.startswith(b"RANK=")), None)


def extraction_worker_killed(before: Path, folder: Path) -> Row:
    """Its shards go to another worker; the stage goes on, and says so."""
    run = Run(before, folder, "tokenize", extract={"workers": 2}).start()
    assert run.process is not None
    workers: list[int] = []
    while not workers:
        workers = [p for p in processes.descendants(run.process.pid) if _role(p) == "worker"]
        assert run.process.poll() is None, run.said()
    time.sleep(2)  # it loads
    when = run.kill(workers[0])
    told: list[dict[str, Any]] = []
    while not told:
        assert time.monotonic() < when + 60, "it was not told"
        lines = (run.root / "events.jsonl").read_text().splitlines()
        told = [e for e in map(json.loads, lines) if e["kind"] == "worker_lost"]
    cause = {"category": "event", "cause": told[0]["said"]}
    seen = Seen({"state": "EXTRACTING", "failure": cause}, time.monotonic() - when)
    return Row(seen, r"worker \d+ died \(signal 9\)", run, run.end())


def _role(pid: int) -> str:
    return processes.described(pid)["role"]


def disk_full(before: Path, folder: Path) -> Row:
    """A small disk; enlarged, the same command goes on."""
    folder.mkdir()
    kept = folder.with_name(f"{folder.name}-kept")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], check=True)
    try:
        run = Run(before, folder / "a", "tokenize", features={"source": "store"}).start()
        seen = after(run, time.monotonic())
        code = run.end()
        assert code == 2, (code, run.said()[-3000:])
        subprocess.run(["mount", "-o", "remount,size=2g", str(folder)], check=True)
        code = run.again()
        shutil.copytree(run.root, kept)
    finally:
        run.end()
        subprocess.run(["umount", "-l", str(folder)], check=True)
    run.root = kept
    return Row(seen, "full disk", run, code, again=True)


def s3_gone(before: Path, folder: Path) -> Row:
    """The mirror's server is killed, and comes back while the supervisor tries again."""
    import s3_servers

    with tempfile.TemporaryDirectory() as disk:
        server = s3_servers.localbucket(Path(disk))
        with pytest.MonkeyPatch.context() as patch:
            s3_servers.use(patch, server.url, patience_s=3)
            run = Run(before, folder, mirror=f"s3://{s3_servers.BUCKET}/a").start()
            run.training(1)
            server.kill()
            seen = after(run, time.monotonic(), timeout=120)
            server.start()
            code = run.end()
        server.kill()
    return Row(seen, "S3", run, code)


def corrupt_shard(before: Path, folder: Path) -> Row:
    run = Run(before, folder)
    shard = sorted((run.root / "features").glob("shard-*"))[0]
    whole = shard.read_bytes()
    middle = len(whole) // 2  # states, not what the reader takes from the data itself
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    run.start()
    seen = after(run, time.monotonic(), FAILED)
    code = run.end()
    assert code == 2, (code, run.said()[-3000:])
    shard.unlink()
    return Row(seen, shard.name, run, run.again(), again=True)


def bad_sample(before: Path, folder: Path) -> Row:
    run = Run(None, folder, prepare={"bad_lines": "refuse"})
    data = folder / "prompts.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join([*lines[:6], '{"messages": 3}\n', *lines[6:]]))
    run.start()
    seen = after(run, time.monotonic(), FAILED)
    code = run.end()
    assert code == 2, (code, run.said()[-3000:])
    data.write_text("".join(lines))
    return Row(seen, r"prompts.jsonl:7", run, run.again(), again=True)


def two_runs(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start()
    run.training()
    begun = time.monotonic()
    second = subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", "run", str(run.config)],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert second.returncode == 2
    state = {"state": "(second run)", "failure": {"category": "exit 2", "cause": second.stderr}}
    return Row(Seen(state, time.monotonic() - begun), "another draftsmith process", run, run.end())


def terminal_closed(before: Path, folder: Path) -> Row:
    leader, follower = pty.openpty()
    run = Run(before, folder)
    run.start(stdin=follower, stdout=follower, stderr=follower, preexec_fn=_take_terminal)
    os.close(follower)
    run.training()
    os.close(leader)
    return Row(run.until(lambda s: s["done"] > 8), "", run, run.end())


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def clock_jumps(before: Path, folder: Path) -> Row:
    """The worker's clock goes a day forward: nothing is stalled, nothing dead."""
    run = Run(before, folder).start("clock_jumps@8")
    when = run.harmed()
    seen = run.until(lambda s: s["state"] not in ("LOADING", "TRAINING"), when)
    assert seen.state["state"] != "STALLED", seen
    return Row(seen, "", run, run.end())


def host_memory(before: Path, folder: Path) -> Row:
    """A worker that eats memory in a control group of 3 GB, so that the system kills it."""
    new = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if new else "/sys/fs/cgroup/memory") / "draftsmith-test"
    group.mkdir(exist_ok=True)
    (group / ("memory.max" if new else "memory.limit_in_bytes")).write_text(str(3 << 30))
    try:
        run = Run(before, folder, supervise={**SUPERVISE, "stall_s": 60.0})
        run.start("eats_memory@8", preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))
        seen = after(run, run.harmed())
        code = run.end()
    finally:
        time.sleep(0.5)
        group.rmdir()
    return Row(seen, "the system killed a process for want of memory", run, code)


def port_in_use(before: Path, folder: Path) -> Row:
    run = Run(before, folder).start()
    run.training()
    begun = time.monotonic()
    watch = [sys.executable, "-m", "draftsmith.cli", "watch", str(run.root), "--web"]
    first = subprocess.Popen([*watch, "0"], stdout=subprocess.PIPE, text=True, env=environment())
    assert first.stdout is not None
    port = re.findall(r":(\d+)/", first.stdout.readline())[0]
    begun = time.monotonic()
    second = subprocess.run([*watch, port], capture_output=True, text=True, env=environment())
    first.terminate()
    state = {
        "state": "(watch)",
        "failure": {"category": f"exit {second.returncode}", "cause": second.stderr},
    }
    return Row(Seen(state, time.monotonic() - begun), "[Aa]ddress already in use", run, run.end())


FAULTS: dict[str, Fault] = {
    "worker raises": planted("raises", "RuntimeError: the planted error"),
    "worker raises in a chain": planted("chained", r"OSError: \[Errno 5\]"),
    "out of GPU memory": planted("gpu_memory", "GPU memory: .*7.60 GiB"),
    "worker ends itself (exit 7)": planted("ends", "exit code 7"),
    "worker killed -9": killed,
    "supervisor killed -9": supervisor_killed,
    "draftsmith stop": stopped_by_command,
    "host out of memory (control group)": host_memory,
    "disk full (tmpfs)": disk_full,
    "S3 server gone": s3_gone,
    "NaN planted": not_finite,
    "corrupt shard": corrupt_shard,
    "bad sample": bad_sample,
    "stuck in Python": stuck,
    "stuck worker (SIGSTOP)": frozen,
    "one of two ranks killed -9": rank_killed,
    "an extraction worker killed -9": extraction_worker_killed,
    "port in use": port_in_use,
    "two runs in one folder": two_runs,
    "terminal closed": terminal_closed,
    "clock jumps a day": clock_jumps,
}


def main() -> None:
    work, names = Path(sys.argv[1]), sys.argv[2:]
    work.mkdir(parents=True, exist_ok=True)
    before = work / "undisturbed" / "run"
    if not (before / "export").exists():
        assert Run(None, work / "undisturbed").again() == 0, "an undisturbed run"
    print(
        "| fault | status said | after | the cause named | the run then |\n|---|---|---|---|---|",
        flush=True,
    )
    for number, (name, fault) in enumerate(FAULTS.items()):
        if names and name not in names:
            continue
        folder = work / f"{number:02d}-{time.time_ns()}"
        try:
            row = fault(before, folder)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error)[:6000]!r} | | | |", flush=True)
            continue
        said = f"{row.said.state['state']} {row.said.cause}".replace(str(work), "").replace(
            "|", "/"
        )
        then = "goes on by itself" if not row.again else "the same command goes on"
        then += (
            ", same bytes"
            if row.code == 0 and row.run.same_as(row.undisturbed or before)
            else f", EXIT {row.code}, NOT THE SAME"
        )
        left = "" if not left_over(row.run.folder) else ", PROCESSES LEFT"
        print(f"| {name} | {' '.join(said.split())[:230]} | {row.said.after_s:.1f} s | "
              f"{'yes' if row.named else 'NO'} | {then}{left} |", flush=True)  # fmt: skip
    print(json.dumps({"machine_cores": len(os.sched_getaffinity(0))}))


if __name__ == "__main__":
    main()
