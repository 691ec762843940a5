"""Training: what is packed, both sources, ranks, guards, verdicts. Real features of the built-in target."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import command, contents, kill_when, resume
from safetensors.torch import load_file

from draftsmith import configfile, pipeline, places, ranks, train
from draftsmith import manifest as manifests
from draftsmith import tokenize as tokenize_stage
from draftsmith.core import Sample, UserError
from draftsmith.decode.replay import replay
from draftsmith.drafter.attention import by_sample
from draftsmith.drafter.blocks import anchor_limit, anchor_share, make_blocks
from draftsmith.drafter.checkpoint import load_drafter
from draftsmith.drafter.model import DFlash
from draftsmith.features import FeatureBatch
from draftsmith.monitor.state import NoReport
from draftsmith.ranks import Ranks
from draftsmith.train import checkpoints, guards
from draftsmith.train.ceiling import products_of
from draftsmith.train.microbatch import Forward
from draftsmith.train.schedule import plan_steps
from draftsmith.train.sources import open_source
from draftsmith.train.verdict import Judge, answer_of, lookup_tau, worth
from tiny_models import assets

TINY = assets() / "tiny-hybrid"
STEPS = {"max_steps": 6, "checkpoint_every": 3, "verdict_prompts": 4}


def config(extracted: Path, folder: Path, last: str = "extract", **sections) -> Path:
    folder.mkdir(exist_ok=True)
    sections["train"] = {**STEPS, **sections.get("train", {})}
    return resume(extracted, folder, last, **sections)


def losses(run: Path) -> list[float]:
    """Of each step, the last time that it was made."""
    out = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            out[event["step"]] = event["loss"]
    return [out[step] for step in sorted(out)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints.checkpoints(run / "checkpoints")[-1] / "model.safetensors")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def trained(extracted, tmp_path_factory):
    """A run trained from the store, in one process."""
    folder = tmp_path_factory.mktemp("trained")
    done = command("train", config(extracted, folder))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_parts_of_its_start_are_told(trained):
    lines = (trained / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["stage"] == "train"]
    names = [event["what"] for event in events if event["kind"] == "loaded"]
    assert names == [
        "tokens", "the target's embedding and lm_head", "first weights", "optimizer and checkpoint",
    ]  # fmt: skip
    said = sum(event["seconds"] for event in events if event["kind"] == "loaded")
    at = {event["kind"]: event["at"] for event in events if event["kind"] in ("start", "working")}
    assert 0 < said <= at["working"] - at["start"] + 0.1


def test_a_micro_batch_is_bounded_in_tokens_and_blocks(extracted, tmp_path):
    cfg = configfile.load(config(extracted, tmp_path), {}).train
    cfg = cfg.model_copy(update={"anchors_per_sample": 20, "micro_batch_blocks": 30, "epochs": 3})
    lengths, anchors = [30, 100, 50, 200, 300, 40] * 9, [25, 3, 18, 150, 40, 0] * 9
    steps = plan_steps(cfg.model_copy(update={"max_steps": None}), lengths, anchors, seed=0)
    share = anchor_share(anchors, 20)
    drawn = [anchor_limit(a, share, 30) for a in anchors]
    assert drawn[:6] == [13, 2, 9, 30, 20, 0], "by length, and no sample more than a row holds"
    for step in steps:
        for row in step.rows:
            tokens, blocks = sum(lengths[i] for i in row), sum(drawn[i] for i in row)
            assert len(row) == 1 or (tokens <= 256 and blocks <= 30)
    for epoch in range(3):
        rows = [row for step in steps if step.epoch == epoch for row in step.rows]
        assert sorted(sum(rows, [])) == list(range(54))


def test_anchors_are_counted_as_they_are_drawn(extracted, tmp_path):
    cfg = configfile.load(config(extracted, tmp_path), {})
    samples = tokenize_stage.read_samples(cfg, tokenize_stage.finished(cfg))
    pairs = [[a and b for a, b in zip(s.loss_mask, s.loss_mask[1:], strict=False)] for s in samples]
    assert samples.num_anchors == [sum(map(bool, of_sample)) for of_sample in pairs]


def test_live_trains_as_the_store_bit_for_bit(extracted, trained, tmp_path):
    """Each sample alone on both sides: the states are then the same to the bit, and so is the rest."""
    alone = {"extract": {"tokens_per_batch": 1}}
    stored = config(extracted, tmp_path / "store", "tokenize", **alone)
    live = config(extracted, tmp_path / "live", "tokenize", features={"source": "live"}, **alone)
    for stage in ("extract", "train"):
        assert command(stage, stored).returncode == 0
    assert command("extract", live).returncode == 0
    done = command("train", live)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "live" / "run" / "features").exists()
    runs = [tmp_path / name / "run" for name in ("store", "live")]
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[0])) == 6
    assert same(weights(runs[0]), weights(runs[1]))
    whole = [torch.tensor(losses(run)) for run in (trained, runs[1])]
    torch.testing.assert_close(
        *whole, rtol=2e-3, atol=0
    )  # other batches of the target: bf16 states


def test_live_fills_a_store_that_later_epochs_and_runs_read(extracted, tmp_path, monkeypatch):
    """The second epoch computes nothing; a run on the store that was left has the same losses."""
    sections = {"features": {"source": "live", "max_bytes": 10**9}, "train": {"max_steps": None}}
    cfg = configfile.load(config(extracted, tmp_path, "tokenize", **sections), {})
    computed, on_device = [], train.open_source

    def counting(*args):
        opened = on_device(*args)
        original = opened.source._computed
        opened.source._computed = lambda rows: computed.append(rows) or original(rows)
        return opened

    monkeypatch.setattr(train, "open_source", counting)
    pipeline.run(cfg, ["train"])
    assert sorted(sum(computed, [])) == list(range(len(set(sum(computed, []))))), "each once"
    first = losses(cfg.root)
    (cfg.root / "checkpoints").rename(tmp_path / "before")
    (cfg.root / "events.jsonl").unlink()
    computed.clear()
    pipeline.run(cfg, ["train"])
    assert not computed and losses(cfg.root) == first
    before = checkpoints.checkpoints(tmp_path / "before")[-1]
    assert same(weights(cfg.root), load_file(before / "model.safetensors"))
    place, more = cfg.root / "features", tmp_path / "more"
    half = place / "live-2-of-3"  # of three ranks that ended in their first epoch
    half.mkdir()
    (half / "shard-000000.safetensors").write_bytes(b"half")
    for changes, match in (
        ({"train": {"processes": 2, "max_steps": 4}}, None),
        ({"features": {"taps": [0, 2]}}, "taps was"),
    ):
        other = {
            key: {**sections.get(key, {}), **changes.get(key, {})} for key in (*sections, *changes)
        }
        other["features"]["store"] = str(place)
        shutil.rmtree(more, ignore_errors=True)
        done = command("train", config(extracted, more, "tokenize", **other), fresh=True)
        if match:
            assert done.returncode == 2 and match in done.stderr
        else:
            assert done.returncode == 0, done.stderr
            assert [path.name for path in place.iterdir()] == ["live-1-of-1"], (
                "read, and nothing beside it"
            )


def test_a_killed_training_goes_on_bit_for_bit(extracted, trained, tmp_path):
    path = config(extracted, tmp_path)
    seen = lambda run: checkpoints.checkpoints(run / "checkpoints")  # noqa: E731
    kill_when(["train", path], tmp_path / "run", "train", seen)
    assert [p.name for p in seen(tmp_path / "run")] == ["step-3"]
    assert command("train", path).returncode == 0
    assert losses(tmp_path / "run") == losses(trained)
    last = [contents(run / "checkpoints" / "step-6") for run in (tmp_path / "run", trained)]
    assert last[0] == last[1]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_train_as_one_process_and_another_number_goes_on(
    parallel, extracted, trained, tmp_path
):
    """Two ranks to step 3, then one: the loss curve of one process, to rounding."""
    path = config(extracted, tmp_path, train={"parallel": parallel})
    done = command("train", path, "--train.processes", 2, "--train.checkpoint_every", 3, fresh=True)
    assert done.returncode == 0, done.stderr
    whole = torch.tensor(losses(trained))
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "run")), whole, rtol=2e-5, atol=0)
    for name, mine in weights(tmp_path / "run").items():
        torch.testing.assert_close(mine, weights(trained)[name], rtol=0, atol=3e-4)
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step-6")  # as if killed after step 3
    manifest = manifests.read(run / "checkpoints")
    manifests._write(places.at(run / "checkpoints"), {**manifest, "complete": False, "files": {}})
    (run / "events.jsonl").unlink()
    done = command("train", path)
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 3
    torch.testing.assert_close(torch.tensor(losses(run)), whole[3:], rtol=2e-5, atol=0)


def test_an_error_of_one_rank_is_the_commands(extracted, tmp_path):
    path = config(extracted, tmp_path, train={"processes": 2, "lr": 1.0, "clip_norm": 1e9})
    store = tmp_path / "run" / "features"
    shard = sorted(store.glob("shard-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    done = command("train", path, fresh=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert shard.name in done.stderr


def opened_of(path: Path, kind="store", **keys):
    cfg = configfile.load(path, keys)
    shape = train.drafter_shape(cfg)
    opened = open_source(cfg, tokenize_stage.finished(cfg), list(shape.taps), kind, Ranks())
    return cfg, shape, opened


def test_verdicts_are_the_taus_of_drafting_round_by_round(extracted, trained, tmp_path):
    cfg, shape, opened = opened_of(config(extracted, tmp_path))
    drafter = load_drafter(checkpoints.checkpoints(trained / "checkpoints")[-1])
    drafter.share(*opened.shared)
    forward = Forward(cfg, drafter, drafter, None)
    judge = Judge(
        tmp_path, opened.held_out_samples, opened.held_out, forward.hits,
        block_size=shape.block_size, blocks_together=7, num_steps=10, report=NoReport(), ranks=Ranks(),
    )  # fmt: skip
    assert len(opened.held_out_samples) == 4
    tokens = rounds = 0
    for sample, batch in zip(
        opened.held_out_samples,
        opened.held_out.batches([[0], [1], [2], [3]], pinned=False),
        strict=True,
    ):
        first, end = answer_of(sample)
        walked = replay(drafter, sample.input_ids[:end], first, batch.hidden.float())
        tokens, rounds = tokens + sum(walked.emitted), rounds + len(walked.emitted)
    numbers = judge.measure()
    assert numbers["tau"] == tokens / rounds > 1.0
    assert 1.0 <= numbers["tau_shuffled"] < 2.0


def test_prompt_lookup_is_walked_as_the_loop_does():
    text = Sample(0, [5, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3, 9], [0] * 5 + [1] * 8)
    # after 1: 2 (3 9 rejected or cut); ...
    assert lookup_tau([text], 4) == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    "numbers, share, said",
    [
        ({"tau": 1.5, "tau_shuffled": 1.5, "tau_lookup": 1.0}, 0.1, "learns nothing from them"),
        ({"tau": 1.5, "tau_shuffled": 1.5, "tau_lookup": 1.0}, 0.01, None),
        ({"tau": 2.0, "tau_shuffled": 1.5, "tau_lookup": 2.5}, 0.1, None),
        ({"tau": 2.0, "tau_shuffled": 1.5, "tau_lookup": 2.5}, 0.5, "below prompt lookup"),
        ({"tau": 2.0, "tau_shuffled": 1.5, "tau_lookup": 1.0, "tau_init": 3.0}, 0.1, "makes it worse"),
        ({"tau": 4.0, "tau_shuffled": 1.5, "tau_lookup": 1.0, "tau_init": 3.0}, 0.5, None),
    ],
)  # fmt: skip
def test_a_training_that_is_not_worth_it_is_told(numbers, share, said):
    text = worth(numbers, share)
    assert text is None if said is None else said in text[1]


def batch(hidden: torch.Tensor) -> FeatureBatch:
    n = len(hidden)
    return FeatureBatch([7], [n], hidden, torch.zeros(n).long(), torch.ones(n))


@pytest.mark.parametrize(
    "break_it, said",
    [
        (lambda h: h[:, 1].zero_(), "tap 3 is zero everywhere"),
        (lambda h: h[:, 0].copy_(h[:1, 0].clone()), "tap 1 is the same at every token"),
        (lambda h: h[:, 1].copy_(h[:, 0]), "taps 1 and 3 hold the same states"),
        (lambda h: h[4, 0].fill_(math.nan), "tap 1 is not finite"),
    ],
)
def test_dead_features_stop_training_at_its_first_step(break_it, said):
    hidden = torch.randn(9, 2, 16)
    guards.check_alive(batch(hidden), [1, 3])
    break_it(hidden)
    with pytest.raises(UserError, match=said):
        guards.check_alive(batch(hidden), [1, 3])


def test_gradients_that_explode_or_are_not_finite_stop_it():
    watched = guards.Gradients()
    assert not any(watched.wrong(1.0 + k % 3, 2.0) for k in range(30))
    assert watched.wrong(1e4, 2.0) is None, "one alone is clipped"
    assert watched.wrong(1.0, 2.0) is None
    said = [watched.wrong(1e4, 2.0) for _ in range(5)]
    assert said[:4] == [None] * 4 and "1e+04" in said[4] and "usually" in said[4]
    assert "loss nan" in watched.wrong(1.0, math.nan)
    with pytest.raises(UserError, match=r"step 5: found loss.*samples \[7\].*tap 1: rms .* 0 zero"):
        guards.refuse(5, "loss nan", [batch(torch.randn(9, 2, 16))], [1, 3], Ranks())


def test_of_all_ranks_the_one_with_the_bad_states_is_named(monkeypatch):
    """On every rank the same, one without a row included."""
    nan = (False, [41], "tap 1: 1 not finite")
    monkeypatch.setattr(Ranks, "gather", lambda self, mine: [None, (True, [3], "fine"), nan, mine])
    for batches in ([], [batch(torch.randn(9, 2, 16))]):
        with pytest.raises(UserError, match=r"loss nan on samples \[41\] \(tap 1: 1 not finite"):
            guards.refuse(5, "loss nan", batches, [1, 3], Ranks(3, 4))


def test_more_processes_than_gpus_are_refused_before_they_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(UserError, match="8 processes on .*, which has 4 GPUs"),
        ranks.joined("cuda", tmp_path),
    ):
        pass
    assert "nproc-per-node" in (tmp_path / "rank-5.json").read_text()


def test_the_best_checkpoint_outlives_newer_ones(extracted, tmp_path):
    cfg, shape, opened = opened_of(config(extracted, tmp_path))
    drafter = train.first_weights(cfg, shape).share(*opened.shared)
    optimizer = torch.optim.AdamW(drafter.parameters())
    saver = checkpoints.Saver(tmp_path / "out", Ranks(), keep=1)
    for step in (1, 2, 3):
        saver.best = 1
        saver.save(drafter, optimizer, step)
    saver.wait()
    assert [p.name for p in checkpoints.checkpoints(tmp_path / "out")] == ["step-1", "step-3"]


def test_a_damaged_checkpoint_is_refused_and_named(extracted, tmp_path):
    cfg, shape, opened = opened_of(config(extracted, tmp_path))
    drafter = train.first_weights(cfg, shape).share(*opened.shared)
    optimizer = torch.optim.AdamW(drafter.parameters())
    saver = checkpoints.Saver(tmp_path / "out", Ranks(), keep=1)
    saver.save(drafter, optimizer, 7)
    saver.wait()
    saved = tmp_path / "out" / "step-7"
    assert checkpoints.resume(tmp_path / "out", drafter, optimizer) == 7
    optimizer_file = next((saved / "optimizer").glob("*.distcp"))
    for path in (saved / "model.safetensors", optimizer_file):
        whole = path.read_bytes()
        flipped = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
        for damaged, said in (
            (flipped, "other bytes"),
            (whole[:-50], "other bytes"),
            (None, "no such file"),
        ):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"{path.name}.*{said}.*Delete .*step-7"):
                checkpoints.resume(tmp_path / "out", drafter, optimizer)
            path.write_bytes(whole)
    (saved / "sums.json").write_text("{")
    with pytest.raises(UserError, match="sums.json"):
        checkpoints.resume(tmp_path / "out", drafter, optimizer)
    (saved / "sums.json").unlink()  # as of an older version
    assert checkpoints.resume(tmp_path / "out", drafter, optimizer) == 7


def test_a_checkpoint_is_of_its_moment_though_training_goes_on(extracted, tmp_path):
    cfg, shape, opened = opened_of(config(extracted, tmp_path))
    drafter = train.first_weights(cfg, shape).share(*opened.shared)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)

    def step(value):
        for p in drafter.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()

    step(1.0)
    before = {n: p.detach().clone() for n, p in drafter.named_parameters()}
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    saver = checkpoints.Saver(tmp_path / "out", Ranks(), keep=1)
    saver.save(drafter, optimizer, 1)
    for _ in range(5):
        step(-3.0)
    saver.wait()
    again = train.first_weights(cfg, shape)
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    assert checkpoints.resume(tmp_path / "out", again, other) == 1
    assert all(torch.equal(before[n], p) for n, p in again.named_parameters())
    read = [s["exp_avg"] for s in other.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, read, strict=True))


@pytest.mark.parametrize(
    "settings, final",
    [({"weights": "gamma"}, "none"), ({"labels": "target"}, "argmax"), ({"loss": "kl"}, "state"),
     ({"loss": "tv"}, "state"), ({"recompute": True}, "none")],
)  # fmt: skip
def test_every_loss_trains(settings, final, extracted, trained, tmp_path):
    path = config(extracted, tmp_path, "tokenize", features={"final": final}, train=settings)
    assert command("extract", path).returncode == 0
    done = command("train", path)
    assert done.returncode == 0, done.stderr
    found, plain = losses(tmp_path / "run"), losses(trained)
    assert found[-1] < found[0]
    # answers are the target's own greedy text, so that its labels are the text's
    assert (found == plain) == bool({"recompute", "labels"} & set(settings))


def test_curves_are_tensorboards(trained):
    """Read back record by record: length, its checksum, an event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (trained / "logs" / "tensorboard").iterdir()
    data, curves = path.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        for value in event.summary.value:
            curves.setdefault(value.tag, []).append((event.step, value.simple_value))
        data = data[16 + size :]
    assert [step for step, _ in curves["train/loss"]][:6] == [1, 1, 2, 3, 3, 4]
    shown = dict(curves["train/loss"])
    assert [shown[k + 1] for k in range(6)] == pytest.approx(losses(trained))
    assert {"train/tau", "train/survival/3", "train/lr", "train/data_wait"} <= set(curves)


def test_a_logger_that_is_not_installed_is_named(extracted, tmp_path):
    path = config(extracted, tmp_path, train={"loggers": ["wandb"]})
    done = command("train", path)
    assert done.returncode == 2 and "pip install 'draftsmith[wandb]'" in done.stderr


def test_the_benchs_products_are_the_networks():
    """Its list against what the layers are seen to do, forward and backward."""
    from draftsmith.bench import train as bench

    its = dataclasses.replace(
        bench.drafter_shape(bench.config_of(str(TINY)), [1, 3], 2, 4), vocab_size=97
    )
    drafter, seen = (
        DFlash(its).share(torch.randn(97, its.hidden_size), torch.randn(97, its.hidden_size)),
        [],
    )
    for module in drafter.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda m, args, out: seen.append(
                    (args[0].shape[-2], m.in_features, m.out_features, args[0].requires_grad, True)
                )
            )
    blocks = make_blocks(torch.randint(97, (40,)), torch.ones(40), [40], [np.arange(5, 25, 2)], its)
    mask = by_sample(blocks, 4, window=None, causal=False)
    noise = drafter.embed(blocks.block_ids)[None].requires_grad_()  # as from a layer before
    features = torch.randn(1, 40, 2, its.hidden_size)
    context = blocks.context_positions[None]
    drafter(noise, blocks.positions[None], features, context, {"full_attention": mask})
    head = (30, its.hidden_size, 97, True, False)
    assert sorted([*seen, head]) == sorted(products_of(its, 40, 10, 30))
