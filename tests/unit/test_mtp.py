"""The target's own MTP head as a drafter: the checkpoint's layout, drafts, and text that does not change."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import environment, resume
from safetensors.torch import load_file, save_file
from test_bad_input import refused
from test_suites import config, write_rows

from draftsmith.cli import main
from draftsmith.config import TargetConfig
from draftsmith.core import UserError
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.mtp import MTPHead, MTPProposer, load_mtp
from draftsmith.decode.propose import NoProposer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import speculate
from draftsmith.target.load import load_target, text_decoder, unembed
from tiny_models import assets, build, random_ids

LAYER = 3  # the tiny target's first full-attention layer
LAST = 7


@pytest.fixture(scope="module")
def with_head(tmp_path_factory) -> Path:
    """The built-in target with a head that is its own layer LAYER, its inputs' sum in front: a real layout
    with weights that are right now and then.
    """
    folder = tmp_path_factory.mktemp("mtp") / "target"
    shutil.copytree(assets() / "tiny-hybrid", folder)
    weights = load_file(folder / "model.safetensors")
    mine = f"model.layers.{LAYER}."
    layer = {n.replace(mine, "mtp.layers.0."): t.clone() for n, t in weights.items() if mine in n}
    assert len(layer) == 11
    joined = {
        "mtp.fc.weight": torch.cat([torch.eye(256), torch.eye(256)], 1).bfloat16(),
        "mtp.norm.weight": weights["model.norm.weight"].clone(),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(256).bfloat16(),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(256).bfloat16(),
    }
    assert len(layer) + len(joined) == 15, "as Qwen3.5's checkpoints"
    save_file(
        {**weights, **layer, **joined}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def loaded(folder: Path):
    target = TargetConfig(model=str(folder), dtype="float32", device="cpu")
    model = load_target(target)
    return model, load_mtp(target, model)


def test_drafts_are_those_of_the_whole_text_at_once(with_head):
    """Kept keys against a forward over everything; and what was drafted leaves no trace."""
    model, head = loaded(with_head)
    ids = random_ids(40)
    embedding, lm_head, _ = unembed(model)
    hidden = text_decoder(model)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[
        0
    ]
    _, features = TargetSession(model, [LAST]).prefill(ids)
    proposer = MTPProposer(head, model, 4)
    for begin, end in ((0, 17), (17, 18), (18, 23), (23, 39)):
        proposer.extend(ids[begin:end], features[begin:end])
        got = proposer.propose(ids[end]).tokens[1:]
        line, states, want = ids[1 : end + 1], hidden[:end], []
        for _ in range(4):
            out = head(embedding[torch.tensor(line)], states, torch.arange(len(line)))
            want.append(int((out[-1] @ lm_head.T).argmax()))
            line, states = [*line, want[-1]], torch.cat([states, out[-1:]])
        assert got == want


@pytest.mark.parametrize(("count", "sampled"), [(1, False), (7, False), (3, True)])
def test_text_is_the_targets(with_head, count, sampled):
    model, head = loaded(with_head)
    with torch.no_grad():  # right often enough that paths of every length are committed
        head.fc.weight.mul_(0.5)
    for seed in range(2):
        prompt = random_ids(1 if seed else 25, seed)
        texts = []
        for proposer in (NoProposer(), MTPProposer(head, model, count)):
            end = AnswerEnd(eos_ids=[], max_new_tokens=24, loop_ngram=None)
            sampling = Sampling(0.7, seed=3) if sampled else Sampling()
            session = TargetSession(model, [LAST])
            texts.append(speculate(session, prompt, proposer, end, sampling))
        assert len(texts[1].tokens) == 24
        if not sampled:
            assert texts[0].tokens == texts[1].tokens


def test_evaluated_beside_the_others_and_refused_where_there_is_none(with_head, tmp_path, capsys):
    file = write_rows(tmp_path / "own.jsonl", [{"prompt": "Count: 1 2 3"}, {"prompt": "Hello"}])
    path = config(tmp_path, [str(file)], methods=["ar", "mtp"], mtp_tokens=2)
    assert "without tensors named mtp" in refused(capsys, "evaluate", path)
    path.write_text(path.read_text().replace(str(assets() / "tiny-hybrid"), str(with_head)))
    assert main(["evaluate", str(path)]) == 0
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    mtp = report["suites"][0]["methods"]["mtp"]
    assert mtp["identical"] == 2 and max(t for t, n in enumerate(mtp["histogram"]) if n) <= 3
    other = tmp_path / "other"
    shutil.copytree(with_head, other)
    weights = load_file(other / "model.safetensors")
    del weights["mtp.fc.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert "built otherwise" in refused(capsys, "evaluate", path, "--target.model", other)


def test_families_whose_head_would_be_another():
    """A family without Qwen3.5's layout is refused, whatever lies in the checkpoint."""
    with pytest.raises((UserError, TypeError, AttributeError)):
        MTPHead(build("bamba"))


@pytest.mark.slow
def test_a_trained_head_is_accepted(extracted, tmp_path):
    path = resume(extracted, tmp_path, "tokenize")
    recipe = Path(__file__).parents[2] / "recipes/tiny-target/mtp.py"
    out = tmp_path / "with-head"
    done = subprocess.run(
        [sys.executable, str(recipe), str(path), str(out), "--seconds", "60"],
        env=environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file = write_rows(tmp_path / "own.jsonl", [{"prompt": f"Count to {n}."} for n in range(6)])
    drafted = config(tmp_path, [str(file)], methods=["ar", "mtp"], max_new_tokens=40, max_prompts=6)
    assert main(["evaluate", str(drafted), "--target.model", str(out)]) == 0
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    mtp = report["suites"][0]["methods"]["mtp"]
    assert mtp["identical"] == 6 and mtp["tau_pooled"] > 1.05
