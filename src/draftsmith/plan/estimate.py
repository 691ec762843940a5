"""Bytes, hours and memory of each stage, by arithmetic. Every formula is in docs/plan.md.

Letters: H hidden, V vocabulary, K taps, L drafter layers, B block size, n query and m KV heads of
width d in the drafter, I its MLP's width, P its parameters, G GPUs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.config import RunConfig
from draftsmith.drafter.config import DrafterShape
from draftsmith.drafter.loss import CHUNK_LOGITS
from draftsmith.extract.plan import feature_bytes
from draftsmith.plan.rates import Rates
from draftsmith.plan.sizes import TargetSizes
from draftsmith.plan.work import Work
from draftsmith.target.load import TargetInfo
from draftsmith.target.rows import TURN_ROWS

RESERVED_BYTES = 2e9
"""A GPU's context, workspaces and the allocator's slack: assumed."""
USABLE = 0.95
SMALLEST_ROW = 1024
ADAM = 16
"""Bytes a parameter in training: fp32 weights, gradients, two moments."""


@dataclass(frozen=True)
class Machine:
    """What the work runs on. No GPUs: one process on the CPU, whose memory is meant."""

    gpus: int
    memory_bytes: float
    disk_bytes: float | None
    source: str
    nodes: int = 1

    @property
    def replicas(self) -> int:
        """Processes that share the work."""
        return max(1, self.gpus)


@dataclass(frozen=True)
class Job:
    """All that the formulas need."""

    cfg: RunConfig
    info: TargetInfo
    target: TargetSizes
    shape: DrafterShape
    layer_params: int
    fuse_params: int
    work: Work
    machine: Machine
    rates: Rates

    def rate(self, name: str) -> float:
        """The value of a rate."""
        return self.rates[name].value

    @property
    def products(self) -> float:
        """FLOP/s of large matrix products on one GPU."""
        return self.rate("matmul_tflops") * 1e12

    @property
    def element(self) -> int:
        """Bytes of a value in the target's dtype."""
        return getattr(torch, self.cfg.target.dtype).itemsize

    @property
    def params(self) -> int:
        """Of the drafter."""
        return self.layer_params + self.fuse_params

    @property
    def depth(self) -> int:
        """Layers of the target that the features need."""
        return (
            self.info.num_layers if self.cfg.features.final != "none" else self.shape.taps[-1] + 1
        )


@dataclass(frozen=True)
class Stage:
    """One stage. `note` says what bounds it, or what to change."""

    name: str
    hours: float
    memory_bytes: float
    note: str = ""


def store_bytes(job: Job) -> dict[str, int]:
    """Bytes of the whole store for each codec."""
    return feature_bytes(job.cfg, job.info, len(job.shape.taps), job.work.tokens)


def checkpoint_bytes(job: Job) -> tuple[int, int]:
    """Of one checkpoint (weights and AdamW's two moments, fp32), and of all that are on the disk at once:
    those that are kept, the best, and the one being written.
    """
    one = 3 * 4 * job.params
    return one, (job.cfg.train.keep_checkpoints + 2) * one


def regenerate(job: Job) -> Stage:
    """Batched decoding: a step costs the slower of reading the weights and the products."""
    cfg, target, work = job.cfg.regenerate, job.target, job.work
    state = target.state_bytes_per_sequence + target.kv_bytes_per_token * work.mean_tokens
    free = job.machine.memory_bytes * USABLE - RESERVED_BYTES - target.params * job.element
    asked = cfg.concurrency if cfg.by_server else cfg.batch_size
    batch = max(1, min(asked, int(free // max(1, state))))
    memory = target.params * job.element + batch * state + RESERVED_BYTES
    if "regenerate_tokens_per_s" in job.rates:
        rate, note = job.rate("regenerate_tokens_per_s"), "given rate"
    else:
        read = target.params * job.element / (job.rate("memory_gb_s") * 1e9)
        step = max(
            read,
            batch * target.flops_per_token(job.info.num_layers, work.mean_tokens) / job.products,
        )
        rate, note = batch / step * job.rate("decode_share"), f"{batch} sequences at a time"
    return Stage("regenerate", _hours(work.answer_tokens / rate, job), memory, note)


def extract(job: Job) -> Stage:
    """One forward of all tokens; or the disk, where it is slower."""
    memory = _extraction_memory(job, job.cfg.extract.tokens_per_batch) + RESERVED_BYTES
    seconds, note = extraction_seconds(job) / job.machine.replicas, ""
    if "disk_write_mb_s" in job.rates:
        writing = store_bytes(job)[job.cfg.extract.codec] / 1e6 / job.rate("disk_write_mb_s")
        if writing > seconds:
            seconds, note = writing, "the disk's writing decides"
    return Stage("extract", seconds / 3600, memory, note)


def extraction_seconds(job: Job) -> float:
    """Of one pass over all tokens on one GPU."""
    if "extract_tokens_per_s" in job.rates:
        return job.work.tokens / job.rate("extract_tokens_per_s")
    flops = job.target.flops_per_token(job.depth, job.work.mean_tokens)
    return job.work.tokens * flops / (job.products * job.rate("extract_share"))


def train(job: Job, source: str) -> Stage:
    """The drafter's steps, and in each epoch either the store's bytes or the target's forward."""
    epochs, note = job.cfg.train.epochs, ""
    seconds = drafter_seconds(job) * epochs / job.machine.replicas
    if source == "live":
        seconds += extraction_seconds(job) * epochs / job.machine.replicas
    elif "disk_read_mb_s" in job.rates:
        stored = store_bytes(job)[job.cfg.extract.codec]
        reading = stored / 1e6 / job.rate("disk_read_mb_s") * epochs
        if reading > seconds:
            seconds, note = reading, "the disk's reading decides"
    memory, room = training_memory(job, source, job.cfg), job.machine.memory_bytes * USABLE
    if memory > room:
        note = _what_fits(job, source, room)
    return Stage(f"train ({source})", seconds / 3600, memory, note)


def _what_fits(job: Job, source: str, room: float) -> str:
    """Settings that change no number of the training: FSDP2, activations made again, and for live shorter
    rows of the target.
    """
    rows = [job.cfg.extract.tokens_per_batch]
    while source == "live" and rows[-1] // 2 >= SMALLEST_ROW:
        rows.append(rows[-1] // 2)
    shared = job.machine.gpus // job.machine.nodes > 1  # FSDP2 has someone to share with
    ways = (
        [("ddp", False), ("fsdp", False), ("fsdp", True)]
        if shared
        else [("ddp", False), ("ddp", True)]
    )
    for parallel, recompute in ways:
        for row in rows:
            train = job.cfg.train.model_copy(update={"parallel": parallel, "recompute": recompute})
            extract = job.cfg.extract.model_copy(update={"tokens_per_batch": row})
            cfg = job.cfg.model_copy(update={"train": train, "extract": extract})
            if training_memory(job, source, cfg) <= room:
                said = [f"train.parallel: {parallel}"] if parallel == "fsdp" else []
                said += ["train.recompute: true"] if recompute else []
                said += [f"extract.tokens_per_batch: {row}"] if row != rows[0] else []
                return " and ".join(said) + (" fit" if len(said) > 1 else " fits")
    return "does not fit with any setting"


def drafter_seconds(job: Job) -> float:
    """Of one epoch on one GPU."""
    if "train_slots_per_s" in job.rates:
        return job.work.anchors * job.shape.block_size / job.rate("train_slots_per_s")
    return _drafter_flops(job) / (job.products * job.rate("train_share"))


def _drafter_flops(job: Job) -> float:
    """Of one epoch, backward included. The features need no gradient, and the frozen lm_head none."""
    s, H = job.shape, job.info.hidden_size
    keys_values = 2 * H * 2 * s.num_key_value_heads * s.head_dim * s.num_layers
    context = job.work.tokens * (2 * 2 * job.fuse_params + 3 * keys_values)
    slots = job.work.anchors * s.block_size
    seen = job.work.mean_tokens / 2 + s.block_size
    attention = 4 * s.num_attention_heads * s.head_dim * seen * s.num_layers
    head = 2 * H * job.info.vocab_size * (s.block_size - 1) / s.block_size
    return context + slots * (3 * (2 * job.layer_params + attention) + 2 * head)


def training_memory(job: Job, source: str, cfg: RunConfig) -> float:
    """Bytes on one GPU at the peak of a step. With FSDP2 the drafter's state is shared out."""
    P, s, train = job.params, job.shape, cfg.train
    H, V = job.info.hidden_size, job.info.vocab_size
    G = job.machine.replicas // job.machine.nodes if train.parallel == "fsdp" else 1
    context = max(train.micro_batch_tokens, job.work.mean_tokens)
    slots = train.blocks_together * s.block_size
    tables = (job.target.embedding + job.target.head) * job.element
    states = ADAM * P / G + 2 * P
    batch = context * len(s.taps) * H * job.element
    kept = kept_bytes(s, context, slots, recompute=train.recompute)
    logits = min(CHUNK_LOGITS, slots * V) * (2 + 4 + 2) + 2 * slots * H * 2
    total = tables + states + batch + kept + logits + RESERVED_BYTES
    if source == "live":
        layers = job.target.cut_params(job.depth) - job.target.embedding
        total += layers * job.element + _activations(job, cfg.extract.tokens_per_batch)
        total += (TURN_ROWS - 1) * cfg.extract.tokens_per_batch * len(s.taps) * H * job.element
    return total


def kept_bytes(s: DrafterShape, context: float, slots: float, *, recompute: bool = False) -> float:
    """What the backward pass of a row needs, of `context` tokens and `slots` block slots; `recompute`:
    each layer's input, and one layer whole. FlexAttention's mask is one of tiles, and counts as nothing.
    """
    layers = slots * slot_bytes(s) / (s.num_layers if recompute else 1)
    inputs = slots * s.num_layers * 2 * s.hidden_size if recompute else 0.0
    return layers + inputs + context * context_bytes(s)


def slot_bytes(s: DrafterShape) -> int:
    """One block slot, all layers, in bf16, each operation by itself (layers that are compiled keep less). In
    a layer: two norms, their inputs widened to fp32 and their outputs; queries, keys and values of the
    block through norm and rotation, the attention's output; gate, up, silu and product of the MLP.
    """
    queries, keys = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    layer = 16 * s.hidden_size + 10 * queries + 10 * keys + 8 * s.intermediate_size
    return s.num_layers * layer + 3 * s.hidden_size


def context_bytes(s: DrafterShape) -> int:
    """One context token: the fused state and its norm; in every layer keys and values."""
    return 9 * s.hidden_size + s.num_layers * 10 * s.num_key_value_heads * s.head_dim


def evaluate(job: Job) -> Stage:
    """One prompt at a time: every target call reads the weights. Accepted drafts are not counted on."""
    cfg = job.cfg.evaluate
    answers = min(cfg.max_new_tokens, job.work.answer_tokens / job.work.samples)
    prompts = min(cfg.max_prompts, job.work.samples)
    call = job.target.params * job.element / (job.rate("memory_gb_s") * 1e9)
    call /= job.rate("decode_share")
    seconds = prompts * answers * call * len(cfg.methods)
    state = (
        job.target.kv_bytes_per_token * job.work.mean_tokens + job.target.state_bytes_per_sequence
    )
    memory = (job.target.params + job.params) * job.element + state + RESERVED_BYTES
    return Stage("evaluate", seconds / 3600, memory, "at most; one GPU")


def _extraction_memory(job: Job, tokens: int) -> float:
    return job.target.cut_params(job.depth) * job.element + _activations(job, tokens)


def _activations(job: Job, tokens: int) -> float:
    """The widest part of a layer, the states at the taps, and their stack."""
    taps = 2 * len(job.shape.taps) * job.info.hidden_size * job.element
    return tokens * (job.target.widest_bytes_per_token + taps)


def _hours(gpu_seconds: float, job: Job) -> float:
    return gpu_seconds / job.machine.replicas / 3600


def plain(rates: Rates) -> dict[str, Any]:
    """For JSON."""
    return {name: {"value": rate.value, "source": rate.source} for name, rate in rates.items()}
