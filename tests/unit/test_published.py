"""Published checkpoints become drafters; what servers would read differently is refused."""

import dataclasses
import json
import shutil

import pytest
import torch
from runs import resume
from safetensors.torch import load_file, save_file
from test_drafter import MIXED, drafter_for, shape

from draftsmith.cli import main
from draftsmith.core import UserError
from draftsmith.drafter.checkpoint import load_drafter, read_shape, save_drafter
from draftsmith.drafter.config import warm_shape, zlab_config
from draftsmith.drafter.published import shape_from


def saved(folder, drafter, change=lambda config: None):
    folder.mkdir(exist_ok=True)
    save_drafter(folder, drafter, torch.bfloat16)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


def as_speculators(folder, drafter):
    """The same drafter as speculators 0.9.0 saves it (models/dflash/config.py, core.py)."""
    folder.mkdir()
    its = drafter.shape
    body = zlab_config(its)
    for key in ("architectures", "block_size", "dflash_config", "num_target_layers", "use_cache"):
        del body[key]  # and Qwen3's defaults are left out, as to_diff_dict does
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in its.taps],
        "block_size": its.block_size,
        "draft_vocab_size": its.vocab_size,
        "mask_token_id": its.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "transformer_layer_config": body,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: t.bfloat16() for name, t in drafter.state_dict().items()}
    table = torch.randn(its.vocab_size, its.hidden_size).bfloat16()
    extra = {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("causal", [None, True, False])
def test_zlabs_layout_comes_back(tmp_path, causal):
    drafter = drafter_for(dataclasses.replace(shape(MIXED), causal=causal))
    assert load_drafter(saved(tmp_path / "x", drafter)).shape == drafter.shape


def test_older_configs_leave_things_out(tmp_path):
    drafter = drafter_for(shape(("full_attention",) * 2, window=2048))

    def older(config):
        del config["layer_types"], config["dflash_config"]["block_size"], config["rope_parameters"]

    assert read_shape(saved(tmp_path / "x", drafter, older)) == drafter.shape


def test_speculators_layout_becomes_the_same_drafter(tmp_path):
    drafter = drafter_for(shape(MIXED))
    folder = as_speculators(tmp_path / "x", drafter)
    with pytest.raises(UserError, match="num_target_layers"):
        read_shape(folder)
    again = load_drafter(folder, num_target_layers=8)
    assert again.shape == drafter.shape
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "whole head"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1]}},
            "whole head",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "plain RoPE",
        ),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 3]}}, "id below"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 7]}}, "below the last"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "one set of layers"),
        ({"attention_bias": True}, "z-lab's network"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"dflash_config": None}, "a DFlash drafter"),
        ({"draft_vocab_size": 64}, "whole vocabulary"),
    ],
)
def test_what_servers_would_misread(tmp_path, change, named):
    folder = saved(tmp_path / "x", drafter_for(shape()), lambda config: config.update(change))
    with pytest.raises(UserError) as error:
        read_shape(folder)
    assert named in str(error.value) and "config.json" in str(error.value)


def test_speculators_that_sample_from_the_anchor(tmp_path):
    folder = as_speculators(tmp_path / "x", drafter_for(shape()))
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError, match="sample_from_anchor"):
        shape_from({**config, "sample_from_anchor": True}, "x", 8)


def test_a_tensor_too_many_or_of_another_shape(tmp_path):
    folder = saved(tmp_path / "x", drafter_for(shape()))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for wrong in (
        {**tensors, "layers.9.mlp.up_proj.weight": torch.ones(2, 2)},
        {**tensors, "fc.weight": torch.ones(64, 64)},
        {name: t for name, t in tensors.items() if name != "norm.weight"},
    ):
        save_file(wrong, path)
        with pytest.raises(UserError, match="z-lab's layout"):
            load_drafter(folder)


def test_a_warm_start_must_not_be_contradicted():
    from draftsmith.config import DrafterConfig

    its = shape(MIXED)
    cfg = DrafterConfig(layers=2, block_size=4, init_from="x")
    assert warm_shape(cfg, its, [1, 3]) == dataclasses.replace(its, block_size=4)
    for wrong, taps in (
        (DrafterConfig(layers=3, init_from="x"), [1, 3]),
        (DrafterConfig(layers=2, head_dim=8, init_from="x"), [1, 3]),
        (DrafterConfig(layers=2, init_from="x"), [1, 4]),
    ):
        with pytest.raises(UserError, match="init_from x"):
            warm_shape(wrong, its, taps)


def test_a_warm_start_goes_on_where_the_drafter_was(extracted, tmp_path, capsys):
    """Train, then start another run from its export: the first loss is the first run's last, and
    the export can be evaluated in place of a trained drafter."""
    asked = {"methods": ["ar", "chain"], "max_prompts": 2}
    path = resume(extracted, tmp_path, "extract", evaluate=asked)
    shutil.copytree(tmp_path / "run", tmp_path / "warm")
    assert main(["run", str(path), "--train.epochs", "8"]) == 0
    export = tmp_path / "run" / "export"
    card = (export / "README.md").read_text()
    assert "target_layer" not in card and "num_speculative_tokens" in card and "| chain |" in card
    args = [
        "--run",
        str(tmp_path / "warm"),
        "--drafter.init_from",
        str(export),
        "--train.log_every",
        "1",
    ]
    assert main(["run", str(path), *args, "--train.lr", "1e-6", "--train.max_steps", "2"]) == 0

    def losses(run):
        rows = [json.loads(line) for line in (tmp_path / run / "events.jsonl").open()]
        return [row["loss"] for row in rows if row["kind"] == "step"]

    cold, warm = losses("run"), losses("warm")
    assert abs(warm[0] - cold[-1]) < 0.5 * (cold[0] - cold[-1]), "it goes on from there"
    capsys.readouterr()
    args = ["--run", str(tmp_path / "run"), "--evaluate.drafter", str(export)]
    assert main(["evaluate", str(path), *args]) == 0
    wrong = ["--run", str(tmp_path / "other"), "--drafter.init_from", str(export)]
    assert main(["run", str(path), *wrong, "--features.taps", "[0, 1]"]) == 2
    assert "features.taps" in capsys.readouterr().err
    assert not (tmp_path / "other").exists(), "before anything is made"
    assert main(["run", str(path), *wrong[:3], str(tmp_path / "none")]) == 2
    assert "DFlash drafter" in capsys.readouterr().err
