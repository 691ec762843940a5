"""A user's mistake: one message with place, found, expected, remedy; exit 2; nothing half-written."""

import json
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest
import torch
import transformers as tf
import yaml
from runs import resume, write_config

from draftsmith import configfile, extract
from draftsmith import tokenize as tokenize_stage
from draftsmith.cli import main
from draftsmith.core import UserError
from draftsmith.source import Choice
from tiny_models import assets


def refused(capsys, *args: object) -> str:
    """The one message of a command that must exit 2."""
    assert main([str(a) for a in args]) == 2
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said and said.count("draftsmith:") == 1
    assert ": found " in said and "; expected " in said, said
    return said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def tokenized(extracted: Path, tmp_path: Path) -> Path:
    """The configuration of a run that has its tokens."""
    return resume(extracted, tmp_path, "tokenize")


@pytest.fixture
def stored(extracted: Path, tmp_path: Path) -> Path:
    """The configuration of a run that has its features."""
    return resume(extracted, tmp_path, "extract")


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        (
            "extract",
            "codek",
            "none",
            ["extract.codek", "unknown key", "codec (did you mean that?)"],
        ),
        ("train", "lr", -1.0, ["train.lr", "-1.0", "greater than 0"]),
        (
            "drafter",
            "block_size",
            1,
            ["drafter.block_size", "found 1", "greater than or equal to 2"],
        ),
        ("features", "taps", [1, 1, 3], ["features.taps", "found [1, 1, 3]", "each layer once"]),
        ("features", "taps", [3, 1], ["features.taps", "ascend"]),
        ("features", "source", "disk", ["features.source", "'live'", "'store'"]),
        ("train", "labels", "target", ["train.labels: target", "features.final: argmax"]),
        ("train", "loss", "kl", ["train.loss: kl", "features.final: state"]),
        ("train", "micro_batch_blocks", 2, ["micro_batch_blocks 2", "anchors_per_sample 4"]),
        ("features", "store", "gs://bucket/x", ["features.store", "local folder"]),
        ("regenerate", "top_p", 0.7, ["regenerate", "temperature above 0"]),
        ("evaluate", "methods", ["chain"], ["evaluate.methods", "must include ar"]),
        ("drafter", "layer_types", ["full_attention"], ["drafter", "1 entries for 2 layers"]),
        ("prepare", "sources", [], ["prepare.sources"]),
        ("train", "max-steps", 3, ["train.max-steps", "max_steps (did you mean that?)"]),
        ("train", "gamma", 2.0, ["train", "gamma 2.0 weighs nothing"]),
        ("train", "lr", float("inf"), ["train.lr", "finite"]),
        ("evaluate", "suites", [], ["evaluate.suites"]),
        (
            "tokenize",
            "template_kwargs",
            {"date": date(2024, 7, 26)},
            ["template_kwargs", "quote dates"],
        ),
    ],
)
def test_a_wrong_value_names_its_key(path, capsys, section, key, value, words):
    data = yaml.safe_load(path.read_text())
    data[section][key] = value
    path.write_text(yaml.safe_dump(data))
    said = refused(capsys, "run", path)
    assert all(word in said for word in words), said
    assert not (path.parent / "run").exists()


def test_the_same_from_the_command_line(path, capsys):
    assert "train.lrr" in refused(capsys, "train", path, "--train.lrr", "3e-4")
    assert "nonsense" in refused(capsys, "train", path, "nonsense")
    cfg = configfile.load(path, {"train.lr": "3e-4", "seed": 7})
    assert (cfg.train.lr, cfg.seed) == (3e-4, 7)


def test_the_designs_whole_example_loads():
    text = """
run: runs/x
seed: 0
target:     {model: Qwen/Qwen3.6-27B, revision: main, dtype: bfloat16, gpus_per_replica: 1}
prepare:    {sources: [{path: chats.jsonl, format: messages, weight: 1.0}], held_out: 0.02}
regenerate: {enabled: true, servers: [], launch: null, max_new_tokens: 2048, temperature: 0.0}
tokenize:   {max_length_tokens: 4096, too_long: truncate, template_kwargs: {enable_thinking: false}}
features:   {source: auto, taps: auto, num_taps: 5, final: none, store: null, max_bytes: null}
extract:    {tokens_per_batch: 16384, codec: none}
drafter:    {layers: 5, block_size: 16, layer_types: auto, sliding_window: 2048, mask_token_id: auto}
train:      {epochs: 6, max_steps: null, lr: 6.0e-4, anchors_per_sample: 512, tokens_per_step: 32768,
             micro_batch_tokens: 4096, labels: data, loss: ce, weights: dpace}
evaluate:   {suites: [held_out], methods: [ar, lookup, chain], max_new_tokens: 2048, temperature: 0.0, tree_budget: 64}
export:     {layout: zlab}
engine:     {kind: local}
"""
    assert (
        configfile.with_overrides(yaml.safe_load(text), {}, where="design").drafter.block_size == 16
    )


@pytest.mark.parametrize("text", ["", "just words", "run: [", "- 1"])
def test_a_file_that_is_no_configuration(tmp_path, capsys, text):
    (tmp_path / "c.yaml").write_text(text)
    assert "c.yaml" in refused(capsys, "run", tmp_path / "c.yaml")
    assert "nothere.yaml" in refused(capsys, "run", tmp_path / "nothere.yaml")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", ["not JSON"]),
        ("", ["empty line"]),
        ('{"messages": []}', ["no list 'messages'"]),
        ('{"messages": [{"role": "robot", "content": "x"}]}', ["messages[0] of role"]),
        ('{"messages": [{"role": "user", "content": 5}]}', ["messages[0].content", "int"]),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ["without a question"]),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', ["'tools'"]),
        ("[1, 2]", ["no list 'messages'"]),
        (
            '{"messages": [{"role": ["user"], "content": "x"}]}',
            ["messages[0] of role"],
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "source": 3}', ["'source'"]),
        ('{"messages": [{"role": "user", "content": "x"}], "source": "\\ud800"}', ["'source'"]),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', ["not text"]),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"f": 1}]}]}', ["tool_calls"]),
        ("[" * 100_000, ["not JSON"]),
        ("9" * 5000, ["not JSON"]),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(path, capsys, line, words):
    data = path.parent / "prompts.jsonl"
    good = data.read_text().splitlines()
    data.write_text("\n".join([*good[:4], line, *good[4:6]]) + "\n")
    said = refused(capsys, "prepare", path)
    assert f"{data}:5" in said and all(word in said for word in words), said
    assert not list((path.parent / "run").rglob("*.parquet"))


def test_bytes_that_do_not_decode_empty_and_missing_files(path, capsys):
    data = path.parent / "prompts.jsonl"
    data.write_bytes(data.read_bytes()[:50] + b"\xff\xfe\n")
    assert f"{data}:1" in refused(capsys, "prepare", path)
    good = b'{"messages": [{"role": "user", "content": "x"}]}\n'
    data.write_bytes(good * 3 + b"\xff\n")
    assert f"{data}:4" in refused(capsys, "prepare", path), "the line, not where the reader began"
    data.write_text("")
    assert f"{data}:1: found an empty file" in refused(capsys, "prepare", path)
    data.unlink()
    assert "no such file" in refused(capsys, "prepare", path)


def test_taps_that_cannot_be_captured(tokenized, capsys):
    assert "tap 8" in refused(capsys, "extract", tokenized, "--features.taps", "[1, 8]")
    assert "the last layer" in refused(capsys, "extract", tokenized, "--features.taps", "[1, 7]")
    assert "features.num_taps" in refused(capsys, "extract", tokenized, "--features.num_taps", "9")
    assert not (tokenized.parent / "run" / "features").exists()
    said = refused(capsys, "train", tokenized)
    assert "draftsmith extract" in said


def test_a_model_without_decoder_layers(tokenized, capsys, tmp_path):
    tf.T5Config(d_model=32, num_layers=1, d_ff=32, num_heads=2).save_pretrained(tmp_path / "t5")
    tokenizer = tf.AutoTokenizer.from_pretrained(assets() / "tiny-hybrid")
    tokenizer.save_pretrained(tmp_path / "t5")
    said = refused(capsys, "extract", tokenized, "--target.model", tmp_path / "t5")
    assert "no decoder layers" in said
    assert "nowhere" in refused(
        capsys, "extract", tokenized, "--target.model", tmp_path / "nowhere"
    )


def test_a_conversation_that_the_template_refuses(path, capsys):
    target = path.parent / "strict"
    shutil.copytree(assets() / "tiny-hybrid", target)
    (target / "chat_template.jinja").write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    data = path.parent / "prompts.jsonl"
    lines = data.read_text().splitlines()
    two = json.dumps(
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    )
    data.write_text("\n".join([*lines[:2], two, *lines[2:]]) + "\n")
    assert main(["prepare", str(path)]) == 0
    capsys.readouterr()
    said = refused(capsys, "regenerate", path, "--target.model", target)
    assert f"{data}:3" in said and "one message only" in said
    tools = {
        "messages": [{"role": "user", "content": "b"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    data.write_text(json.dumps(tools) + "\n" + lines[0] + "\n")
    assert main(["prepare", str(path)]) == 0
    capsys.readouterr()
    assert "drops them without a word" in refused(
        capsys, "regenerate", path, "--target.model", target
    )


def test_samples_without_supervised_tokens_are_counted_and_listed(path, capsys):
    rows = [("x " * n + "?", "an answer") for n in range(1, 60)]
    data = path.parent / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            )
            + "\n"
            for q, a in rows
        )
    )
    args = ["--regenerate.enabled", "false", "--tokenize.max_length_tokens", "48"]
    assert main(["prepare", str(path), *args]) == main(["tokenize", str(path), *args]) == 0
    manifest = json.loads((path.parent / "run/data/tokens/manifest.json").read_text())
    count = manifest["counts"]["without_supervised_tokens"]
    assert 0 < count < 59
    assert len(manifest["counts"]["listed_without_supervised_tokens"]) == count
    assert manifest["files"]["part-00000.parquet"]["rows"] == 59 - count


def test_a_store_made_for_something_else(stored, capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(assets() / "tiny-hybrid", other)
    model = tf.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.5
    model.to(torch.bfloat16).save_pretrained(other)
    said = refused(capsys, "train", stored, "--target.model", other)
    assert "weights_digest" in said
    assert "taps" in refused(capsys, "train", stored, "--features.taps", "[1, 2, 5]")
    text = (other / "tokenizer.json").read_text()
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        shutil.copy(assets() / "tiny-hybrid" / name, other / name)
    (other / "tokenizer.json").write_text(text.replace("<tool_call>", "<tool_kall>"))
    said = refused(capsys, "train", stored, "--target.model", other)
    assert "tokenizer" in said and not (stored.parent / "run" / "checkpoints").exists()


def test_too_little_disk_is_seen_before_the_target_is_loaded(tokenized, capsys, monkeypatch):
    usage = shutil.disk_usage(tokenized)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage._replace(free=1000))
    said = refused(capsys, "extract", tokenized, "--features.source", "store")
    assert "1 kB free" in said and "GB for the features" in said
    assert main(["extract", str(tokenized)]) == 0
    assert "features.source auto: live, because" in capsys.readouterr().out
    assert not (tokenized.parent / "run" / "features").exists()


def test_a_disk_that_fills_up_leaves_only_whole_shards(tokenized, capsys, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", small], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        monkeypatch.setattr(extract, "_choice", lambda *a: Choice("store", "the test says so"))
        args = ["extract", tokenized, "--features.store", small / "store"]
        said = refused(capsys, *args)
        assert "a full disk" in said and "Free space" in said
        shards = list((small / "store").glob("shard-*"))
        assert 1 <= len(shards) <= 3 and not list((small / "store").glob(".*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=50m", small], check=True)
        assert main([str(a) for a in args]) == 0
    finally:
        subprocess.run(["umount", small])


def test_status_of_no_run(tmp_path, capsys):
    assert "no state.json" in refused(capsys, "status", tmp_path)


def test_errors_are_one_line():
    error = UserError(where="a.b", found="x", expected="y", remedy="Do z.")
    assert str(error) == "a.b: found x; expected y. Do z."


def test_help_lists_every_key(capsys):
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    for key in (
        "--run",
        "--target.model",
        "--prepare.sources.0.path",
        "--train.lr",
        "--evaluate.methods",
    ):
        assert key in said
    assert main(["train"]) == 2, "a stage needs a configuration"


def test_keys_that_lead_nowhere(path, capsys):
    for args in (
        ["--prepare.sources.5.path", "x"],
        ["--prepare.sources.first.path", "x"],
        ["--seed.x", "1"],
        ["--features.taps", "[1,2"],
        ["--train.lr"],
        ["--seed", "-1"],
        ["--foo-bar", "1"],
    ):
        refused(capsys, "train", path, *args)
    assert configfile.load(path, {"tokenize.template_kwargs.x": 1}).tokenize.template_kwargs == {
        "x": 1
    }
    data = yaml.safe_load(path.read_text())
    del data["tokenize"]["template_kwargs"]
    path.write_text(yaml.safe_dump(data))
    kept = configfile.load(path, {"tokenize.template_kwargs.x": 1}).tokenize.template_kwargs
    assert kept == {"enable_thinking": False, "x": 1}, "the default stays beside a new variable"
    path.write_text(path.read_text() + "seed: 1\nseed: 2\n")
    assert "given twice" in refused(capsys, "train", path)
    refused(capsys, "train", path.parent)


@pytest.mark.parametrize("part", ["data", "eval", "export", "checkpoints/x"])
def test_a_store_in_a_folder_that_is_remade(path, capsys, part):
    store = path.parent / "run" / part
    assert "remakes" in refused(capsys, "run", path, "--features.store", store)


def test_a_run_that_is_a_file_or_has_nothing_to_evaluate_on(path, capsys):
    (path.parent / "file").write_text("x")
    assert "run: " in refused(capsys, "prepare", path, "--run", path.parent / "file")
    assert "prepare.held_out" in refused(capsys, "run", path, "--prepare.held_out", "0")


def test_stages_run_alone_do_not_mix_what_does_not_belong_together(stored, capsys):
    assert main(["prepare", str(stored), "--seed", "5"]) == 0
    for stage in ("regenerate", "tokenize", "extract", "train"):
        assert "data/" in refused(capsys, stage, stored, "--seed", "5")
        assert "seed was 5, is now 0" in refused(capsys, stage, stored)
    other = stored.parent / "other"
    args = ["--run", str(other), "--prepare.max_samples", "8"]
    for stage in ("prepare", "regenerate", "tokenize"):
        assert main([stage, str(stored), *args]) == 0
    capsys.readouterr()
    said = refused(
        capsys, "train", stored, *args, "--features.store", stored.parent / "run/features"
    )
    assert "tokens was" in said, "another run's features"


def test_a_target_without_some_weights_or_with_damaged_ones(path, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(assets() / "tiny-hybrid", other)
    tensors = load_file(other / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if ".layers.3." not in name}
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["prepare", str(path)]) == 0
    capsys.readouterr()
    said = refused(capsys, "regenerate", path, "--target.model", other)
    assert "tensors missing" in said and "layers.3" in said
    (other / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    assert "does not load" in refused(capsys, "regenerate", path, "--target.model", other)


def test_answers_of_one_token_teach_nothing(path, capsys):
    args = ["--regenerate.max_new_tokens", "1"]
    for stage in ("prepare", "regenerate", "tokenize", "extract"):
        assert main([stage, str(path), *args]) == 0
    capsys.readouterr()
    assert "two supervised tokens in a row" in refused(capsys, "train", path, *args)


def test_a_sample_cut_to_one_answer_token_trains_along(path):
    args = ["--tokenize.max_length_tokens", "51", "--train.micro_batch_tokens", "1"]
    for stage in ("prepare", "regenerate", "tokenize", "extract", "train"):
        assert main([stage, str(path), *args]) == 0
    cfg = configfile.load(path, {"tokenize.max_length_tokens": 51})
    samples = tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg), "train")
    assert 1 in {sum(sample.loss_mask) for sample in samples}


def test_a_tokenizer_with_tokens_that_the_target_lacks(path, capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(assets() / "tiny-hybrid", other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "vocab_size": 64}))
    assert main(["prepare", str(path)]) == 0
    capsys.readouterr()
    said = refused(capsys, "regenerate", path, "--target.model", other)
    assert "ids below 64" in said and "prompts.jsonl:" in said


def test_options_may_stand_before_the_configuration(path, capsys):
    assert main(["prepare", "--prepare.max_samples", "5", str(path)]) == 0
    assert "train=5" in capsys.readouterr().out
    assert "CONFIG" in refused(capsys, "prepare", path, "another.yaml")


def test_a_broken_template_or_generation_config_is_named(path, capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(assets() / "tiny-hybrid", other)
    assert main(["prepare", str(path)]) == 0
    (other / "generation_config.json").write_text("{ not json")
    capsys.readouterr()
    assert "does not load" in refused(capsys, "regenerate", path, "--target.model", other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if %}")
    said = refused(capsys, "regenerate", path, "--target.model", other)
    assert "error in its line" in said and "prompts.jsonl" not in said


def test_a_truncated_shard_of_an_unfinished_store(stored, capsys):
    store = stored.parent / "run" / "features"
    manifest = json.loads((store / "manifest.json").read_text())
    begun = ("kind", "inputs", "counts", "made_by")
    (store / "manifest.json").write_text(
        json.dumps({**{key: manifest[key] for key in begun}, "complete": False, "files": {}})
    )
    shard = store / "shard-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    said = refused(capsys, "extract", stored)
    assert "shard-000000" in said and "Delete it" in said
    shard.unlink()
    assert main(["extract", str(stored)]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["serve-check", "x", "--server", "http://x", "--max-prompts", "0"],
        ["bench", "train", "--steps", "0"],
        ["bench", "extract", "--num-rows", "0"],
        ["verify", "x", "--engine", "vllm", "--command", "x", "--samples", "0"],
    ],
)
def test_nothing_is_no_count(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "0 is none" in capsys.readouterr().err
