"""A dress rehearsal of a large run on the GPUs at hand, or of itself on a CPU:

    python recipes/rehearsal/rehearse.py OUT                                  # the tiny hybrid, CPU, minutes
    python recipes/rehearsal/rehearse.py OUT --model qwen3.6-27b --gpus 4 --cap-gib 88 --conversations 2000 \\
        --tokens 1000 --config recipes/rehearsal/27b.yaml

`draftsmith run` takes random weights and synthetic conversations through tokenize, live training with FSDP2 in
GPUS ranks and a cap on each GPU's memory; it is killed with -9, all of it, after `--kill-at` steps; the same
command goes on, evaluates and exports. The export is then checked as a server would read it, and the events
are added up. Prints and writes OUT/rehearsal.json. Exit code 1 when something is not as it should be.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from make import filled_in
from shares import shares

from draftsmith.core import FaultFound
from draftsmith.drafter.checkpoint import load_drafter
from draftsmith.drafter.model import DFlash
from draftsmith.monitor.processes import descendants
from draftsmith.train.checkpoints import checkpoints

HERE = Path(__file__).parent


def main() -> int:
    """Make, run, kill, go on, check."""
    args = _arguments()
    subprocess.run(
        [sys.executable, HERE / "make.py", args.out, "--model", args.model, "--conversations",
         str(args.conversations), "--tokens", str(args.tokens)], check=True,
    )  # fmt: skip
    config = _config(args)
    run = args.out / "run"
    command = [sys.executable, "-m", "draftsmith.cli", "run", str(config)]
    env = _environment(args.cap_gib)
    began = time.time()
    killed = _kill_at(command, env, run, args.kill_at)
    again = time.time()
    code = subprocess.run(command, env=env).returncode
    if code:
        raise FaultFound(f"the run that went on ended by exit code {code}")
    result = {
        "model": args.model, "ranks": args.gpus or 2, "cap_gib": args.cap_gib, "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "killed_at_step": killed, "seconds_to_the_kill": again - began, "seconds_after": time.time() - again,
        "export": check_export(run, config), **shares(run),
    }  # fmt: skip
    gone_on = result["gone_on_from_step"]
    if not 0 < gone_on <= killed:
        raise FaultFound(f"killed after step {killed}, gone on from {gone_on}")
    (args.out / "rehearsal.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--model", default=str(HERE.parents[1] / "src/draftsmith/assets/tiny-hybrid")
    )
    parser.add_argument("--config", type=Path, default=HERE / "tiny.yaml")
    parser.add_argument("--gpus", type=int, default=0, help="ranks; 0: two on the CPU")
    parser.add_argument("--cap-gib", type=float, help="of each GPU's memory, for torch's allocator")
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--kill-at", type=int, default=20, help="steps; 10 more are to come at least"
    )
    return parser.parse_args()


def _config(args: argparse.Namespace) -> Path:
    """The recipe with this machine's places."""
    config = filled_in(args.config, args.out)
    config["train"]["processes"] = args.gpus or 2
    path = args.out / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def _environment(cap_gib: float | None) -> dict[str, str]:
    """With a smaller GPU than there is: torch's allocator refuses what is beyond."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if cap_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        fraction = f"per_process_memory_fraction:{min(1.0, cap_gib / total):.4f}"
        env["PYTORCH_CUDA_ALLOC_CONF"] = f"{fraction},expandable_segments:True"
    return env


def _kill_at(command: list[str], env: dict[str, str], run: Path, step: int) -> int:
    """Start it, and kill supervisor, worker, torchrun and ranks at this step, past a checkpoint."""
    process = subprocess.Popen(command, env=env)
    try:
        while True:
            time.sleep(0.05)
            if process.poll() is not None:
                raise FaultFound(f"it ended by itself (exit code {process.returncode})")
            state: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):
                state = json.loads((run / "state.json").read_text())
            if (
                state.get("state") == "TRAINING"
                and state["done"] >= step
                and checkpoints(run / "checkpoints")
            ):
                return state["done"]
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        print("killed -9", flush=True)


def check_export(run: Path, config: Path) -> dict[str, Any]:
    """Read as a server does: the layout, every tensor by name, shape and dtype, and finite; and one block is
    filled by it.
    """
    export, target = run / "export", yaml.safe_load(config.read_text())["target"]["model"]
    layers = json.loads((Path(target) / "config.json").read_text())["num_hidden_layers"]
    drafter = load_drafter(export, num_target_layers=layers)
    said = json.loads((export / "config.json").read_text())
    assert said["architectures"] == ["DFlashDraftModel"], said["architectures"]
    with torch.device("meta"):
        wanted = {name: x.shape for name, x in DFlash(drafter.shape).state_dict().items()}
    state = drafter.state_dict()
    assert {name: x.shape for name, x in state.items()} == wanted
    assert all(x.isfinite().all() for x in state.values()), "a weight that is not finite"
    size = (export / "model.safetensors").stat().st_size
    return {"tensors": len(wanted), "bytes": size, "block_size": drafter.shape.block_size}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FaultFound as error:
        sys.exit(f"rehearsal: {error}")
