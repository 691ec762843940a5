"""The train stage: a DFlash drafter learns to fill blocks from the target's features.

Random anchors in the supervised text, slot-weighted losses, AdamW with fp32 master weights (bf16
compute on a GPU). Every choice is a pure function of seed, epoch and sample, so a run that was killed
goes on from its last checkpoint with the same numbers, on any number of GPUs.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

import draftsmith.tokenize as tokenize_stage
from draftsmith import extract, files
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, StageResult, Stopped, UserError
from draftsmith.drafter.blocks import anchor_share
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, read_shape
from draftsmith.drafter.config import DrafterShape, check_belongs, resolve_shape, warm_shape
from draftsmith.drafter.model import DFlash
from draftsmith.drafter.parallelize import clip_and_scale, parallelize, synced
from draftsmith.features import FeatureBatch
from draftsmith.monitor.state import NoReport, Report, fail, failure_of, stage_report
from draftsmith.ranks import Ranks, first_error, inside, joined, launch
from draftsmith.signals import stop_is_noted
from draftsmith.target.load import device_of, inspect_target, load_tokenizer
from draftsmith.target.taps import resolve_taps
from draftsmith.train import checkpoints, guards, nodes
from draftsmith.train.ceiling import products_of, seconds_of
from draftsmith.train.loggers import Loggers
from draftsmith.train.microbatch import Forward
from draftsmith.train.schedule import Step, deal, learning_rate, num_rounds, plan_steps
from draftsmith.train.sources import Opened, open_source
from draftsmith.train.verdict import Judge

BETAS = (0.9, 0.95)


def folder(cfg: RunConfig) -> Path:
    """Where checkpoints go."""
    return cfg.root / "checkpoints"


def run(cfg: RunConfig) -> StageResult:
    """Train to the end of the schedule, in one process or in many; go on from the newest checkpoint if
    there is one.
    """
    count = num_processes(cfg)
    if count == 1 or inside():
        return _joined(cfg)
    config = cfg.root / "logs" / "train.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    before = manifests.read(folder(cfg))
    try:
        launch(["train", str(config)], count, cfg.root / "logs")
    except (FaultFound, UserError) as error:  # the first cause, which need not be the lead's
        fail(cfg.root, failure_of(f"{type(error).__name__}: {error}", ""))
        raise
    manifest = manifests.required(folder(cfg), "train", _inputs(cfg)[0])
    return StageResult("train", str(folder(cfg)), before == manifest, manifest["counts"])


def _joined(cfg: RunConfig) -> StageResult:
    """As one rank. Of several nodes the first tells why another's ended."""
    notes = cfg.root / "logs"
    try:
        with joined(device_of(cfg.target).type, notes) as ranks:
            return _run(cfg, ranks)
    except BaseException as error:
        first = first_error(notes) if inside() and os.environ["RANK"] == "0" else None
        if first is None or isinstance(error, UserError):
            raise
        fail(cfg.root, failure_of(f"{type(first).__name__}: {first}", ""))
        raise first from None


def num_processes(cfg: RunConfig) -> int:
    """Training processes on this machine. Raises UserError for more than there are GPUs."""
    if device_of(cfg.target).type == "cpu":
        count = 1 if cfg.train.processes == "auto" else cfg.train.processes
        if count > (cores := os.cpu_count() or 1) and not inside():
            print(f"train: {count} processes on {cores} cores: expect a slow start", flush=True)
        return count
    most = torch.cuda.device_count()
    if cfg.train.processes == "auto":
        return most
    if cfg.train.processes > most:
        raise UserError(
            where="train.processes",
            found=f"{cfg.train.processes}, and {most} GPUs here",
            expected="no more than there are",
            remedy="Lower it, or use auto.",
        )
    return cfg.train.processes


def _run(cfg: RunConfig, ranks: Ranks) -> StageResult:
    out = folder(cfg)
    nodes.check(cfg, ranks)
    tokens = tokenize_stage.finished(cfg)
    sizes = f"train.micro_batch_tokens {cfg.train.micro_batch_tokens}, {cfg.train.blocks_together} blocks"
    reported = (
        stage_report(cfg.root, "train", sizes) if ranks.lead else contextlib.nullcontext(NoReport())
    )
    with reported as report:
        inputs, shape = _inputs(cfg)
        if inputs["source"] == "store" and not is_finished(cfg):
            extract.finished(cfg)  # refused before anything is written
        if ranks.lead:
            manifests.begin(out, "checkpoints/1", inputs, remake=False)
        ranks.barrier()
        manifest = manifests.begin(out, "checkpoints/1", inputs, remake=False)
        if manifest["complete"]:
            return StageResult("train", str(out), skipped=True, summary=manifest["counts"])
        opened = open_source(cfg, tokens, list(shape.taps), inputs["source"], ranks, report.loaded)
        _check_anchors(opened.num_anchors)
        steps = plan_steps(cfg.train, opened.source.lengths, opened.num_anchors, cfg.train_seed)
        embedding, head, softcap = opened.shared
        drafter = first_weights(cfg, shape, embedding.device)
        half = torch.bfloat16 if embedding.device.type == "cuda" else torch.float32
        drafter.share(embedding, head, softcap, dtype=half)
        report.loaded("first weights")
        last = train(cfg, drafter, opened, steps, report, ranks)
        counts = {"steps": len(steps), "samples": len(opened.source.lengths)}
        if ranks.lead:
            manifests.finish(out, manifest, _entries(out / f"step-{len(steps)}"), counts)
        ranks.barrier()
    return StageResult("train", str(out), summary={"steps": len(steps), **last})


def _entries(final: Path) -> dict[str, Any]:
    path = final / "model.safetensors"
    entry = {"sha256": files.file_digest(path), "bytes": path.stat().st_size}
    return {f"{final.name}/{path.name}": entry}


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the finished training of this configuration, or a UserError."""
    return manifests.required(folder(cfg), "train", _inputs(cfg)[0])


def is_finished(cfg: RunConfig) -> bool:
    """Whether training of this configuration is complete: then the features are needed no more."""
    return manifests.is_there(lambda: finished(cfg))


MACHINE = {"log_every", "checkpoint_every", "keep_checkpoints", "processes", "parallel", "recompute",
           "loggers", "verdict_prompts"}  # fmt: skip
"""Settings that change no number of the training."""


def _inputs(cfg: RunConfig) -> tuple[dict[str, Any], DrafterShape]:
    """The features are named by what they are made from, not by their bytes: extracted again on
    another machine, they may differ by rounding, and training goes on.
    """
    shape = drafter_shape(cfg)
    inputs = {
        "features": extract.wanted(cfg),
        "source": extract.source_of(cfg),
        "drafter": asdict(shape),
        "train": cfg.train.model_dump(exclude=MACHINE),
        "seed": cfg.seed,
    }
    if cfg.drafter.init_from:
        weights = find_drafter(cfg.drafter.init_from).glob("*.safetensors")
        inputs["init_from"] = {path.name: files.file_digest(path) for path in weights}
    return inputs, shape


def drafter_shape(cfg: RunConfig) -> DrafterShape:
    """The shape that this configuration trains. Raises UserError when it contradicts the target or
    the warm start.
    """
    info, tokenizer = inspect_target(cfg.target), load_tokenizer(cfg.target)
    taps = resolve_taps(cfg.features, info.num_layers)
    if cfg.drafter.init_from is None:
        return resolve_shape(cfg.drafter, info, taps, tokenizer, info.vocab_size)
    folder = find_drafter(cfg.drafter.init_from)
    published = read_shape(folder, info.num_layers)
    check_belongs(published, info, str(folder))
    return warm_shape(cfg.drafter, published, taps)


def first_weights(
    cfg: RunConfig, shape: DrafterShape, device: torch.device | str = "cpu"
) -> DFlash:
    """Random, or those of drafter.init_from."""
    drafter = DFlash.empty(shape, device).init_weights(cfg.train_seed)
    if cfg.drafter.init_from:
        start = load_drafter(
            find_drafter(cfg.drafter.init_from), num_target_layers=shape.num_target_layers
        )
        drafter.load_state_dict(start.state_dict())
    return drafter


def _check_anchors(num_anchors: Sequence[int]) -> None:
    """An anchor needs two supervised tokens in a row: without any there is nothing to learn."""
    if not any(num_anchors):
        raise UserError(
            where="train",
            found="no training sample with two supervised tokens in a row",
            expected="answers of at least two tokens",
            remedy="Raise regenerate.max_new_tokens or tokenize.max_length_tokens.",
        )


@dataclass(frozen=True)
class Sums:
    """Of one step over all ranks: the mean loss, the gradients' norm before it was limited, and the
    share of anchors whose first k drafts are right, k = 1..B-1; of this rank: seconds waited for
    features, and the micro-batches; and whether any rank was told to stop.
    """

    loss: Tensor
    norm: Tensor
    survival: Tensor
    waited_s: float
    batches: list[FeatureBatch]
    stopping: Tensor


def train_step(
    forward: Forward, batches: Iterator[FeatureBatch | None], rounds: int, epoch: int, ranks: Ranks,
    *, clip_norm: float, stopping: bool = False,
) -> Sums:  # fmt: skip
    """Gradients of one step: the mean over its weighted slots, however they are batched and shared out."""
    B, waited, seen = forward.drafter.shape.block_size, 0.0, []
    sums = torch.zeros(B + 3, dtype=torch.float64, device=forward.device)
    sums[-1] = stopping
    for k in range(rounds):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        with synced(forward.net, last=k == rounds - 1):
            loss, anchors = forward.loss(batch, epoch)
            loss.weighted_sum.backward()
        kept = loss.correct[:, 1:].cumprod(-1).sum(0)
        counts = torch.stack(
            [loss.weighted_sum.detach(), loss.weight_sum, kept.new_tensor(anchors)]
        )
        sums[:-1] += torch.cat([counts, kept])
        seen += [] if batch is None else [batch]
    ranks.sum(sums)
    weight = sums[1].clamp_min(1e-9)
    factor = (ranks.count / weight).float()  # what ranks hold is the mean of their sums
    norm = clip_and_scale(forward.drafter, factor, clip_norm)
    survival = sums[3:-1] / sums[2].clamp_min(1)
    return Sums(sums[0] / weight, norm, survival, waited, seen, sums[-1] > 0)


def train(
    cfg: RunConfig,
    drafter: DFlash,
    opened: Opened,
    steps: list[Step],
    report: Report,
    ranks: Ranks,
) -> dict[str, float]:
    """The loop. Returns the last logged numbers."""
    out, device, settings = folder(cfg), drafter.shared[0].device, cfg.train
    share = anchor_share(opened.num_anchors, settings.anchors_per_sample)
    forward, optimizer = prepare(cfg, drafter, opened.norm, ranks, share)
    begin = checkpoints.resume(out, drafter, optimizer)
    report.loaded("optimizer and checkpoint")
    saver = checkpoints.Saver(out, ranks, settings.keep_checkpoints)
    judge = Judge(
        out, opened.held_out_samples, opened.held_out, forward.hits, report=report, ranks=ranks,
        block_size=drafter.shape.block_size, blocks_together=settings.blocks_together,
        num_steps=len(steps),
    )  # fmt: skip
    loggers = Loggers(cfg) if ranks.lead else None
    report.working(len(steps), "steps", done=begin)
    gradients, taps, last = guards.Gradients(), drafter.shape.taps, {}
    spent = np.zeros(4)  # since the last log: tokens, seconds, seconds waited, rounds
    if begin == 0 and cfg.drafter.init_from:
        judge.before()
    ceiling_s = _ceiling(cfg, drafter)
    dealt = deal(steps, opened.source.lengths, ranks.count)
    dealt = itertools.islice(dealt, begin, None)
    batches = forward.micro_batches(opened.source, steps[begin:], dealt, ranks)
    if begin == 0:
        batches = guards.alive(batches, taps)
    with stop_is_noted() as told:
        for number in range(begin, len(steps)):
            started, step = time.perf_counter(), steps[number]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, number, len(steps))
            rounds = num_rounds(step, ranks.count)
            sums = train_step(
                forward,
                batches,
                rounds,
                step.epoch,
                ranks,
                clip_norm=settings.clip_norm,
                stopping=told(),
            )
            wrong = gradients.wrong(sums.norm.item(), sums.loss.item())
            if wrong:
                guards.refuse(number + 1, wrong, sums.batches, taps, ranks)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done = number + 1
            tokens = sum(opened.source.lengths[i] for row in step.rows for i in row)
            spent += (tokens, time.perf_counter() - started, sums.waited_s, rounds)
            if done % settings.log_every == 0 or done == len(steps):
                survival = sums.survival.tolist()
                last = {
                    "loss": sums.loss.item(),
                    "anchor_tau": 1 + sum(survival),
                    "grad_norm": sums.norm.item(),
                    "lr": optimizer.param_groups[0]["lr"],
                    "tokens_per_s": spent[0] / spent[1],
                    "data_wait": spent[2] / spent[1],
                    **({"of_ceiling": spent[3] * ceiling_s / spent[1]} if ceiling_s else {}),
                    **_memory(device),
                }
                told_of = {"step": done, "epoch": step.epoch, "tokens": int(spent[0])}
                report.event("step", **told_of, **last, survival=survival)
                if loggers:
                    by_slot = {f"survival/{k + 1}": x for k, x in enumerate(survival)}
                    loggers.log(done, {**last, **by_slot})
                spent[:] = 0
            report.progress(done, **last)
            stopping = sums.stopping.item() and done < len(steps)
            saves = done % settings.checkpoint_every == 0 or done == len(steps)
            if saves or done == judge.first:
                last = {**last, **judge.at(done, saved=saves)}
                if loggers:
                    loggers.log(done, last)
            if saves or stopping:
                saver.best = judge.best
                saver.save(drafter, optimizer, done)
            if stopping:
                saver.wait()
                raise Stopped(f"after step {done}")
        saver.wait()
        late = ranks.sum(torch.tensor(float(told()), device=device)).item()
    if late:  # its features and reports may wait: the last checkpoint is there
        raise Stopped(f"after step {len(steps)}, the last")
    if loggers:
        loggers.close()
    return last


def prepare(
    cfg: RunConfig, drafter: DFlash, norm: nn.Module | None, ranks: Ranks, share: float = 1.0
) -> tuple[Forward, torch.optim.Optimizer]:
    """The drafter ready to be trained on its device, compiled there if it is a GPU, shared out over
    ranks; and its optimizer. `share`: of a sample's places, those that get an anchor.
    """
    gpu = drafter.shared[0].device.type == "cuda"
    drafter.recompute = cfg.train.recompute
    net = parallelize(drafter, ranks, cfg.train.parallel, compile_layers=gpu)
    drafter.train()
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=cfg.train.lr, betas=BETAS, weight_decay=cfg.train.weight_decay,
        fused=gpu,
    )  # fmt: skip
    return Forward(cfg, drafter, net, norm, share), optimizer


def _ceiling(cfg: RunConfig, drafter: DFlash) -> float | None:
    """Seconds of a full micro-batch's matrix products on this GPU, alone; on a CPU nobody waits for it."""
    device, train = drafter.shared[0].device, cfg.train
    if device.type != "cuda":
        return None
    labels = train.blocks_together * (drafter.shape.block_size - 1)
    products = products_of(drafter.shape, train.micro_batch_tokens, train.blocks_together, labels)
    return seconds_of(products, device, torch.bfloat16)


def _memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / (1 << 30)}
