"""recipes/cluster as far as one machine without GPUs can show: every script parses; two-nodes.sbatch runs whole, with
stand-ins for Slurm's commands that start its two nodes here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment, write_config

RECIPES = Path(__file__).parents[2] / "recipes" / "cluster"
SRUN = """#!/usr/bin/env bash
# runs its command once for each of --nodes, at once
nodes=1
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
for ((i = 0; i < nodes; i++)); do SLURM_NODEID=$i "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = "#!/usr/bin/env bash\necho localhost\necho localhost\n"


@pytest.mark.parametrize("script", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_scripts_parse_and_say_how_they_are_called(script):
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(
        ["bash", script], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode != 0 and "usage: " in done.stderr


@pytest.mark.slow
def test_two_nodes_under_slurm(tmp_path):
    """Two torchruns of two processes each, FSDP2 within, live features; from conversations to the export."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = write_config(
        tmp_path, features={"source": "live"}, train={"parallel": "fsdp", "max_steps": 6}
    )
    env = {
        **environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }  # fmt: skip
    words = ["bash", RECIPES / "two-nodes.sbatch", config, "--evaluate.methods", "[ar, chain]"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    run = tmp_path / "run"
    assert (run / "export" / "model.safetensors").stat().st_size > 1e5
    assert (run / "checkpoints" / "step-6").is_dir()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert len(list((run / "checkpoints" / "step-6" / "optimizer").glob("*.distcp"))) >= 2
