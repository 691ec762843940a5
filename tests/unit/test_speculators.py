"""The package speculators' own checkpoint, and what the package computes with it (0.9.0;
tests/checkpoints/speculators, made by its make.py): the imported drafter computes the same.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import write_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.cli import main
from draftsmith.config import TargetConfig
from draftsmith.core import UserError
from draftsmith.decode.session import TargetSession
from draftsmith.drafter.attention import by_sample
from draftsmith.drafter.blocks import make_blocks
from draftsmith.drafter.checkpoint import load_drafter, read_shape
from draftsmith.drafter.config import DrafterShape
from draftsmith.drafter.model import ContextCache, DFlash
from draftsmith.drafter.published import shape_from
from draftsmith.target.load import load_target, unembed
from tiny_models import assets

MADE = Path(__file__).parents[1] / "checkpoints" / "speculators"
LAYERS, COLUMNS, CLOSE = 8, 48, 1e-4
WITHIN = 3  # the anchors whose whole context lies in every slot's window
SHAPE = DrafterShape(
    hidden_size=256,
    intermediate_size=32,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=20000.0,
    max_position_embeddings=4096,
    vocab_size=3072,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=24,
    block_size=8,
    mask_token_id=3064,
    taps=(3, 6),
    num_target_layers=LAYERS,
)


@pytest.fixture(scope="module")
def target():
    cfg = TargetConfig(model=str(assets() / "tiny-hybrid"), dtype="float32", device="cpu")
    return load_target(cfg, dtype=torch.float32)


@pytest.fixture(scope="module")
def package():
    return load_file(MADE / "outputs.safetensors")


def imported(target, folder=MADE / "checkpoint") -> DFlash:
    return load_drafter(folder, num_target_layers=LAYERS).share(*unembed(target))


def features(target, package, name: str, drafter: DFlash) -> Tensor:
    """The stored random ones, or the target's own of the stored text at the drafter's taps."""
    if name == "random":
        return package["random.features"].float()
    session = TargetSession(target, list(drafter.shape.taps))
    return session.prefill(package["text.input_ids"].tolist())[1]


def in_training(drafter: DFlash, package, name: str, given: Tensor, first=None) -> Tensor:
    """The training forward's hidden states [anchors, B, H]; `first`: the first context token that a
    sliding layer's slots see at each anchor, in place of our own window.
    """
    ids, anchors, shape = package[f"{name}.input_ids"], package["anchors"], drafter.shape
    B, S = shape.block_size, len(package[f"{name}.input_ids"])
    blocks = make_blocks(ids, torch.ones_like(ids), [S], [anchors.numpy()], shape)
    masks = {
        kind: by_sample(blocks, B, window=shape.window(kind), causal=shape.is_causal(kind))
        for kind in set(shape.layer_types)
    }
    if first is not None:
        (mask,) = masks["sliding_attention"].masks
        seen = torch.arange(S) < anchors[:, None]
        seen &= torch.arange(S) >= first[:, None]
        mask[:, :S] = seen.repeat_interleave(B, 0)
    noise, positions = drafter.embed(blocks.block_ids)[None], blocks.positions[None]
    hidden = drafter(noise, positions, given[None], blocks.context_positions[None], masks)
    return hidden[0].view(len(anchors), B, -1)


def in_decoding(drafter: DFlash, package, name: str, given: Tensor, i: int) -> Tensor:
    """Logits of slots 1..B-1 at anchor i, as `evaluate` computes them."""
    anchor = int(package["anchors"][i])
    cache = ContextCache(drafter)
    cache.append(given[:anchor])
    return drafter.slots(int(package[f"{name}.input_ids"][anchor]), cache)


def difference(drafter: DFlash, package, name: str, given: Tensor) -> float:
    """The largest difference from the package, hidden states and logits, within the window."""
    hidden = in_training(drafter, package, name, given)[:WITHIN]
    worst = [(hidden - package[f"{name}.hidden"][:WITHIN]).abs().max()]
    for i in range(WITHIN):
        logits = in_decoding(drafter, package, name, given, i)
        worst.append((logits[:, ::COLUMNS] - package[f"{name}.logits"][i, 1:]).abs().max())
    return float(torch.stack(worst).max())


def test_the_shape_is_what_the_package_was_told():
    assert read_shape(MADE / "checkpoint", LAYERS) == SHAPE


@pytest.mark.parametrize("name", ["random", "text"])
def test_outputs_are_the_packages(target, package, name):
    drafter = imported(target)
    given = features(target, package, name, drafter)
    assert difference(drafter, package, name, given) < CLOSE
    for i in range(WITHIN):
        drafted = in_decoding(drafter, package, name, given, i).argmax(-1)
        assert drafted.tolist() == package[f"{name}.argmax"][i, 1:].tolist()


def test_beyond_the_window_servers_decide(target, package):
    """The package gives every slot the context from anchor - window on; servers, and draftsmith,
    what is less than the window away from the slot. Nothing else differs.
    """
    drafter = imported(target)
    given = features(target, package, "random", drafter)
    first = package["anchors"] - drafter.shape.sliding_window
    same = in_training(drafter, package, "random", given, first)
    assert (same - package["random.hidden"]).abs().max() < CLOSE
    ours = in_training(drafter, package, "random", given)
    assert (ours - package["random.hidden"])[WITHIN:].abs().max() > 0.1


def swapped(one: str, other: str):
    def change(tensors, config):
        for name in [n for n in tensors if one in n.split(".")]:
            twin = name.replace(one, other)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


def fused_the_other_way_round(tensors, config):
    first, second = tensors["fc.weight"].chunk(2, 1)
    tensors["fc.weight"] = torch.cat([second, first], 1).contiguous()


def told(**keys):
    return lambda tensors, config: config.update(keys)


def told_of_the_transformer(**keys):
    return lambda tensors, config: config["transformer_layer_config"].update(keys)


WRONG = {
    "q_norm and k_norm": swapped("q_norm", "k_norm"),
    "the layers' two norms": swapped("input_layernorm", "post_attention_layernorm"),
    "hidden_norm and norm": swapped("hidden_norm", "norm"),
    "the taps' order": fused_the_other_way_round,
    "layer ids one early": told(aux_hidden_state_layer_ids=[3, 6]),
    "mask id": told(mask_token_id=0),
    "causality": told(sliding_window_non_causal=True),
    "rope's base": told_of_the_transformer(rope_parameters={"rope_theta": 1e4}),
    "layer types": told_of_the_transformer(layer_types=["full_attention", "sliding_attention"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_import_shows(tmp_path, target, package, what):
    tensors = load_file(MADE / "checkpoint" / "model.safetensors")
    config = json.loads((MADE / "checkpoint" / "config.json").read_text())
    WRONG[what](tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = imported(target, tmp_path)
    given = features(target, package, "text", drafter)
    assert difference(drafter, package, "text", given) > 10 * CLOSE


def config_of(name: str) -> dict:
    return json.loads((MADE / "configs" / f"{name}.json").read_text())


def test_what_the_trainers_defaults_write_is_read():
    """The default command, and Llama's config class, for a target of Qwen3.5's family: multimodal
    RoPE's sections stay in the config and mean plain RoPE.
    """
    full_size = replace(
        SHAPE, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        rope_theta=1e4, sliding_window=2048, block_size=16, taps=(1, 3, 4),
    )  # fmt: skip
    sliding, full = "sliding_attention", "full_attention"
    assert shape_from(config_of("defaults"), "x", LAYERS) == replace(
        full_size, num_layers=5, layer_types=(sliding,) * 5
    )
    assert shape_from(config_of("llama-full"), "x", LAYERS) == replace(
        full_size, layer_types=(sliding, full)
    )
    assert shape_from(config_of("non-causal"), "x", LAYERS) == replace(
        full_size, layer_types=(sliding, sliding), causal=False
    )


def test_a_whole_vocabulary_may_be_the_class_default():
    """Qwen3's vocabulary is its config class's default, which some versions leave out."""
    config = config_of("defaults")
    del config["transformer_layer_config"]["vocab_size"]
    assert shape_from({**config, "draft_vocab_size": 151936}, "x", LAYERS).vocab_size == 151936


@pytest.mark.parametrize(
    ("name", "found", "rest"),
    [
        ("small-vocabulary", "draft_vocab_size 512", "--draft-vocab-size"),
        ("from-anchor", "sample_from_anchor", "--no-sample-from-anchor"),
        ("partial-rotary", "'partial_rotary_factor': 0.25", "whole head"),
        ("embeddings-tapped", "layer_ids [0, 4, 7], that is taps [-1, 3, 6]", "taps 0 to 6"),
        ("last-tapped", "layer_ids [4, 8], that is taps [3, 7]", "taps 0 to 6"),
        ("unordered", "layer_ids [7, 4], that is taps [6, 3]", "ascending"),
        ("dspark", "speculators' dspark, DSparkDraftModel", "a DFlash drafter"),
        ("dflash2", "speculators' dflash2, DFlash2DraftModel", "a DFlash drafter"),
        ("eagle3", "speculators' eagle3, Eagle3DraftModel", "a DFlash drafter"),
    ],
)
def test_what_cannot_be_represented_is_named(name, found, rest):
    with pytest.raises(UserError) as error:
        shape_from(config_of(name), "config.json", LAYERS)
    assert found in str(error.value) and rest in str(error.value)


def test_evaluated_and_trained_further(tmp_path):
    """As a warm start its first loss is a trained drafter's; as it is, its drafts are accepted."""
    path = write_config(
        tmp_path,
        prompts=24,
        features={"taps": [3, 6]},
        drafter={"layers": 2, "block_size": 8},
        evaluate={"methods": ["ar", "chain"]},
    )
    warm = ["--drafter.init_from", str(MADE / "checkpoint"), "--train.max_steps", "2"]
    assert main(["run", str(path), *warm]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert len(losses) == 2 and losses[0] < 5.5, "a random drafter starts at ln 3072 = 8.0"
    assert main(["evaluate", str(path), "--evaluate.drafter", str(MADE / "checkpoint")]) == 0
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    chain = report["suites"][0]["methods"]["chain"]
    assert chain["tau_pooled"] > 1.2 and chain["mismatches"] == 0
