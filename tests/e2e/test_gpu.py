"""The same code on a GPU: extraction against the CPU, exact decoding, and a whole run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import write_config

from draftsmith.cli import main
from draftsmith.config import TargetConfig
from draftsmith.core import Sample
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.propose import LookupProposer, NoProposer
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import speculate
from draftsmith.target.forward import StatesForward
from draftsmith.target.load import load_target
from tiny_models import GDN_FAMILIES, assets, build, random_ids

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


def states(device: str, dtype: str) -> list[torch.Tensor]:
    samples = [Sample(i, random_ids(n, i), [1] * n) for i, n in enumerate((40, 11, 150, 64))]
    target = TargetConfig(model=str(assets() / "tiny-hybrid"), dtype=dtype, device=device)
    forward = StatesForward(load_target(target), [1, 3, 5], "none", torch.float32)
    return [one.hidden for one in forward(samples).features()]


CPU = """
import sys
sys.modules["fla"] = None  # Transformers would call its kernels on CPU tensors
import torch, test_gpu
torch.save(test_gpu.states("cpu", "float32"), sys.argv[1])
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_equal_the_cpus(dtype, tmp_path):
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", CPU, tmp_path / "cpu.pt"], check=True, env={**os.environ, "PYTHONPATH": path}
    )  # fmt: skip
    pairs = zip(torch.load(tmp_path / "cpu.pt"), states("cuda", dtype), strict=True)
    worst = max(((a - b).norm() / a.norm()).item() for a, b in pairs)
    print(f"{dtype}: relative difference {worst:.2e}")
    tf32 = importlib.util.find_spec("fla") is not None  # in fla's kernels
    assert worst < (3e-2 if dtype == "bfloat16" else 5e-3 if tf32 else 1e-4)


@pytest.mark.parametrize("family", ["qwen3", *GDN_FAMILIES])
def test_speculative_text_is_the_autoregressive_text(family):
    model = build(family).cuda()
    prompt = random_ids(20)
    texts = []
    for proposer in (NoProposer(), LookupProposer(7)):
        end = AnswerEnd(eos_ids=[], max_new_tokens=150, loop_ngram=None)
        texts.append(speculate(TargetSession(model, [1]), prompt, proposer, end).tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_run(tmp_path, dtype):
    path = write_config(tmp_path, prompts=200, target={"dtype": dtype, "device": "cuda"})
    assert main(["run", str(path)]) == 0
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    chain = report["suites"][0]["methods"]["chain"]
    if dtype == "float32":
        assert chain["mismatches"] == 0
    assert (tmp_path / "run/export/model.safetensors").exists()
