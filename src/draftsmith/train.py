"""The train stage: a DFlash drafter learns to fill blocks from the target's features.

Random anchors in the supervised text, slot-weighted cross-entropy, AdamW with fp32 master weights
(bf16 compute on a GPU). Every choice is a pure function of seed, epoch and sample, so a run that
was killed goes on from its last checkpoint with the same numbers.
"""

import io
import itertools
import math
import pickle
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import draftsmith.tokenize as tokenize_stage
from draftsmith import extract, files
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig, TrainConfig
from draftsmith.core import Sample, StageResult, UserError
from draftsmith.drafter.blocks import draw_anchors, make_blocks, slot_weights
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, read_shape, save_drafter
from draftsmith.drafter.config import DrafterShape, check_belongs, resolve_shape, warm_shape
from draftsmith.drafter.loss import block_loss, leading_correct
from draftsmith.drafter.model import DFlash
from draftsmith.features import FeatureBatch, StoreSource
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.store.reader import StoreReader
from draftsmith.target.load import device_of, inspect_target, load_target, load_tokenizer, unembed
from draftsmith.target.taps import resolve_taps

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Step:
    """One optimizer step: its micro-batches, as positions into the source's samples."""

    epoch: int
    rows: list[list[int]]


def folder(cfg: RunConfig) -> Path:
    """Where checkpoints go."""
    return cfg.root / "checkpoints"


def run(cfg: RunConfig) -> StageResult:
    """Train to the end of the schedule; go on from the newest checkpoint if there is one."""
    out = folder(cfg)
    tokens = tokenize_stage.finished(cfg)
    if not is_finished(cfg):
        extract.finished(cfg)
    with stage_report(cfg.root, "train") as report:
        inputs, shape = _inputs(cfg)
        manifest = manifests.begin(out, "checkpoints/1", inputs, remake=False)
        if manifest["complete"]:
            return StageResult("train", str(out), skipped=True, summary=manifest["counts"])
        reader = StoreReader(cfg.store)  # which holds fewer samples with features.max_bytes
        samples = tokenize_stage.read_samples(cfg, tokens, "train").among(reader.sample_ids)
        _check_anchors(samples)
        source = StoreSource(reader, samples.sample_ids)
        steps = plan_steps(cfg.train, source, cfg.seed)
        drafter = first_weights(cfg, shape).to(device_of(cfg.target))
        drafter.share(*frozen_weights(cfg))
        last = train(cfg, drafter, source, steps, report)
        final = out / f"step-{len(steps)}"
        entries = {
            f"{final.name}/model.safetensors": {
                "sha256": files.file_digest(final / "model.safetensors"),
                "bytes": (final / "model.safetensors").stat().st_size,
            }
        }
        counts = {"steps": len(steps), "samples": len(samples)}
        manifest = manifests.finish(out, manifest, entries, counts)
    return StageResult("train", str(out), summary={"steps": len(steps), **last})


def finished(cfg: RunConfig) -> dict[str, Any]:
    """The manifest of the finished training of this configuration, or a UserError."""
    return manifests.required(folder(cfg), "train", _inputs(cfg)[0])


def is_finished(cfg: RunConfig) -> bool:
    """Whether training of this configuration is complete: then the features are needed no more."""
    return manifests.is_there(lambda: finished(cfg))


def _inputs(cfg: RunConfig) -> tuple[dict[str, Any], DrafterShape]:
    """The features are named by what they are made from, not by their bytes: extracted again on
    another machine, they may differ by rounding, and training goes on.
    """
    shape = drafter_shape(cfg)
    settings = cfg.train.model_dump(exclude={"log_every", "checkpoint_every", "keep_checkpoints"})
    inputs = {
        "features": extract.wanted(cfg),
        "drafter": asdict(shape),
        "train": settings,
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


def first_weights(cfg: RunConfig, shape: DrafterShape) -> DFlash:
    """Random, or those of drafter.init_from."""
    drafter = DFlash(shape).init_weights(cfg.seed)
    if cfg.drafter.init_from:
        start = load_drafter(
            find_drafter(cfg.drafter.init_from), num_target_layers=shape.num_target_layers
        )
        drafter.load_state_dict(start.state_dict())
    return drafter


def _check_anchors(samples: Sequence[Sample]) -> None:
    """An anchor needs two supervised tokens in a row: without any there is nothing to learn."""
    for sample in samples:
        mask = sample.loss_mask
        if any(a and b for a, b in zip(mask, mask[1:], strict=False)):
            return
    raise UserError(
        where="train",
        found="no training sample with two supervised tokens in a row",
        expected="answers of at least two tokens",
        remedy="Raise regenerate.max_new_tokens or tokenize.max_length_tokens.",
    )


def frozen_weights(cfg: RunConfig) -> tuple[Tensor, Tensor, float]:
    """The target's embedding, lm_head and soft cap; the rest of the target is dropped again."""
    model = load_target(cfg.target.model_copy(update={"device": "cpu"}))
    embedding, head, softcap = unembed(model)
    return (
        embedding.detach().clone(),
        head.detach().clone() if head is not embedding else embedding,
        softcap,
    )


def plan_steps(train: TrainConfig, source: StoreSource, seed: int) -> list[Step]:
    """Every optimizer step of the run: micro-batches gathered up to `tokens_per_step` target tokens
    (a micro-batch that holds more is a step of its own).
    """
    steps: list[Step] = []
    for epoch in range(train.epochs):
        plan = source.plan(tokens_per_batch=train.micro_batch_tokens, seed=seed, epoch=epoch)
        rows: list[list[int]] = []
        held = 0
        for row in plan.rows:
            tokens = sum(source.lengths[i] for i in row)
            if rows and held + tokens > train.tokens_per_step:
                steps.append(Step(epoch, rows))
                rows, held = [], 0
            rows.append(row)
            held += tokens
        steps.append(Step(epoch, rows))
    return steps[: train.max_steps]


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Linear warmup, then cosine to zero. `step` counts from 0."""
    warmup = max(1, round(train.warmup_ratio * num_steps))
    if step < warmup:
        return train.lr * (step + 1) / warmup
    return train.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def train(
    cfg: RunConfig, drafter: DFlash, source: StoreSource, steps: list[Step], report: StageReport
) -> dict[str, float]:
    """The loop. Returns the last logged numbers."""
    out, device = folder(cfg), drafter.fc.weight.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=cfg.train.lr, betas=BETAS, weight_decay=cfg.train.weight_decay
    )
    weights = slot_weights(drafter.shape.block_size, cfg.train.gamma)
    begin = resume(out, drafter, optimizer)
    report.working(len(steps), "steps", done=begin)
    last: dict[str, float] = {}
    drafter.train()
    batches = micro_batches(source, steps[begin:], device)
    for number in range(begin, len(steps)):
        started, step = time.perf_counter(), steps[number]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg.train, number, len(steps))
        loss_sum, weight_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        guessed, anchors, tokens = torch.zeros((), device=device), 0, 0
        for batch in itertools.islice(batches, len(step.rows)):
            drawn = [
                draw_anchors(
                    mask.cpu().numpy(),
                    limit=cfg.train.anchors_per_sample,
                    seed=cfg.seed,
                    epoch=step.epoch,
                    sample_id=i,
                )
                for mask, i in zip(batch.loss_mask, batch.sample_ids, strict=True)
            ]
            blocks = make_blocks(batch.input_ids, batch.loss_mask, drawn, drafter.shape, weights)
            context_positions = torch.arange(batch.input_ids.shape[1], device=device).expand_as(
                batch.input_ids
            )
            with autocast:
                hidden = drafter(
                    drafter.embed(blocks.block_ids),
                    blocks.positions,
                    batch.hidden,
                    context_positions,
                    blocks.masks,
                )
                loss = block_loss(drafter, hidden, blocks)
            if loss.weighted_sum.requires_grad:  # false when no slot of the micro-batch has a label
                loss.weighted_sum.backward()
            loss_sum += loss.weighted_sum.detach()
            weight_sum += blocks.weights.sum()
            guessed += leading_correct(loss.correct).sum()
            anchors += sum(len(a) for a in drawn)
            tokens += batch.num_tokens
        # The mean over the step's weighted slots, however they were batched.
        for parameter in drafter.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight_sum.clamp_min(1e-9)
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.train.clip_norm)
        _check_finite(norm, loss_sum, number, step, source)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = number + 1
        if done % cfg.train.log_every == 0 or done == len(steps):
            last = {
                "loss": (loss_sum / weight_sum.clamp_min(1e-9)).item(),
                "anchor_tau": 1 + (guessed / max(1, anchors)).item(),
                "grad_norm": norm.item(),
                "lr": optimizer.param_groups[0]["lr"],
                "tokens_per_s": tokens / (time.perf_counter() - started),
            }
            report.event("step", step=done, epoch=step.epoch, **last)
        report.progress(done, **last)
        if done % cfg.train.checkpoint_every == 0 or done == len(steps):
            save(out, drafter, optimizer, done)
            prune(out, cfg.train.keep_checkpoints)
    return last


def micro_batches(
    source: StoreSource, steps: list[Step], device: torch.device
) -> Iterator[FeatureBatch]:
    """The steps' micro-batches on the device, states in fp32 (autocast narrows them on a GPU)."""
    rows = [row for step in steps for row in step.rows]
    for batch in source.batches(rows, pinned=device.type == "cuda"):
        yield batch.to(device, torch.float32)


def save(out: Path, drafter: DFlash, optimizer: torch.optim.Optimizer, step: int) -> None:
    """checkpoints/step-N: fp32 drafter in z-lab's layout, and the optimizer's state. Appears whole."""
    with files.new_folder(out / f"step-{step}") as temporary:
        save_drafter(temporary, drafter, torch.float32)
        buffer = io.BytesIO()  # torch.save to a file words a full disk as an internal error
        torch.save(optimizer.state_dict(), buffer)
        (temporary / "optimizer.pt").write_bytes(buffer.getvalue())


def checkpoints(out: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in out.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def resume(out: Path, drafter: DFlash, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; the step to go on from."""
    found = checkpoints(out)
    if not found:
        return 0
    drafter.load_state_dict(load_drafter(found[-1]).state_dict())
    path = found[-1] / "optimizer.pt"
    try:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise UserError(
            where=str(path),
            found=f"no optimizer state ({type(error).__name__})",
            expected="what training saved",
            remedy=f"Delete {found[-1]}; training goes on from the checkpoint before.",
        ) from error
    return int(found[-1].name[5:])


def prune(out: Path, keep: int) -> None:
    """Delete all but the newest checkpoints."""
    for path in checkpoints(out)[:-keep]:
        gone = path.rename(out / f".{path.name}.tmp")  # half-deleted, it must not look whole
        shutil.rmtree(gone)


def _check_finite(
    norm: Tensor, loss_sum: Tensor, number: int, step: Step, source: StoreSource
) -> None:
    if not (torch.isfinite(norm) & torch.isfinite(loss_sum)):
        samples = [source.sample_ids[i] for row in step.rows for i in row]
        raise UserError(
            where=f"train step {number + 1}",
            found=f"loss {loss_sum.item()}, gradient norm {norm.item()} on samples {samples[:20]}",
            expected="finite numbers",
            remedy="Lower train.lr, or check these samples' features.",
        )
