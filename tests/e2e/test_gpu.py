"""The same code on a GPU: extraction against the CPU, exact decoding, and a whole run."""

import json

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_equal_the_cpus(dtype):
    samples = [Sample(i, random_ids(n, i), [1] * n) for i, n in enumerate((40, 11, 150, 64))]
    states = []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        target = TargetConfig(model=str(assets() / "tiny-hybrid"), dtype=kind, device=device)
        forward = StatesForward(load_target(target), [1, 3, 5], "none", torch.float32)
        states.append([f.hidden for f in forward(samples).features()])
    worst = max(((a - b).norm() / a.norm()).item() for a, b in zip(*states, strict=True))
    print(f"{dtype}: relative difference {worst:.2e}")
    assert worst < (1e-4 if dtype == "float32" else 3e-2)


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
