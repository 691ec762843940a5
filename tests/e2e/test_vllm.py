"""A real vLLM, where one is installed: on a GPU, or its build for CPUs (docs/serving.md has the command).

DRAFTSMITH_VLLM names its program; it lives in an environment of its own.
"""

import json
import os
import shutil

import pytest
from runs import command, resume

from tiny_models import assets

VLLM = os.environ.get("DRAFTSMITH_VLLM") or shutil.which("vllm")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="no vllm here; DRAFTSMITH_VLLM names one"),
]
SERVE = (
    f"env -u PYTHONPATH VLLM_CPU_KVCACHE_SPACE=1 {VLLM} serve {assets() / 'tiny-hybrid'} "
    "--dtype bfloat16 --enforce-eager --no-enable-prefix-caching --max-model-len 512 --max-num-seqs 4"
)


@pytest.fixture(scope="module")
def exported(extracted, tmp_path_factory):
    """A run of a few prompts, trained, evaluated and exported."""
    config = resume(extracted, tmp_path_factory.mktemp("served"), "extract")
    for stage in ("train", "evaluate", "export"):
        done = command(stage, config)
        assert done.returncode == 0, done.stderr
    return config.parent / "run"


def test_what_evaluate_measured_is_what_a_server_serves(exported):
    """Gated DeltaNet, attention and our drafter in vLLM: same acceptance, same text."""
    done = command("serve-check", exported / "export", "--command", SERVE, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((exported / "serve" / "report.json").read_text())
    assert report["acceptance"]["agrees"] and report["template"] == "same"
    assert report["runs"]["drafter"]["drafted_per_round"] == 3
    assert report["text"]["mismatches"] == 0


def test_a_servers_hidden_states_are_the_stores(exported):
    """No zero row, no shifted layer: what older versions wrote."""
    asked = ("--engine", "vllm", "--command", SERVE, "--samples", "4")
    done = command("verify", exported / "features", *asked, timeout=900)
    if "pin_memory=True requires" in done.stderr:
        pytest.skip("this vLLM's extractor needs a GPU")
    assert done.returncode == 0, done.stdout + done.stderr
