"""From tokens to a drafter: features, extract, drafter, train."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.config.base import S3_ADDRESS, Auto, Codec, Section


class FeaturesConfig(Section):
    source: Literal["auto", "store", "live"] = "auto"
    """store: extracted once, read in every epoch; live: the target runs beside the trainer, on its GPU,
    and nothing is written (with max_bytes, what fits); auto: the store if it fits.
    """
    taps: Auto | list[int] = "auto"
    """0-based decoder layers whose raw output is captured; auto: z-lab's formula."""
    num_taps: Annotated[int, Field(ge=1)] = 5
    """How many, for `taps: auto`."""
    final: Literal["none", "state", "argmax"] = "none"
    """Also keep the last layer's output before the final norm, or the target's argmax."""
    store: str | None = None
    """Where the store is: a folder or s3://bucket/prefix; null: RUN/features."""
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bound on the store's size. store: what fits is a random share of the samples, and training uses
    those. live: what fits is written in the first epoch and read in the later ones. auto: live, unless
    all fit.
    """
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the stored states."""

    @field_validator("taps")
    @classmethod
    def _distinct(cls, taps: Auto | list[int]) -> Auto | list[int]:
        if isinstance(taps, list):
            if not taps:
                raise ValueError("give at least one tap")
            if len(set(taps)) != len(taps):
                raise ValueError("each layer once")
            if min(taps) < 0:
                raise ValueError("layers counted from 0")
            if taps != sorted(taps):
                raise ValueError("taps that ascend")
        return taps

    @field_validator("store")
    @classmethod
    def _known_place(cls, store: str | None) -> str | None:
        if store is None or "://" not in store:
            return store
        if not re.fullmatch(S3_ADDRESS, store):
            raise ValueError(f"{store}: a local folder or s3://bucket/prefix")
        return store


class FilesConfig(Section):
    path: str
    """Folder of *.safetensors: vLLM's shared_storage_path, or DATA/hidden_states of speculators."""
    layer_ids: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """The ids that the server was given (eagle_aux_hidden_state_layer_ids), in order: id k is the
    state after k layers, so tap i is id i + 1 and features.final is id N.
    """
    codec: Literal["none", "fp8"] = "none"
    """fp8: files of hs-connectors' FP8 connector, a scale a token."""


class ExtractConfig(Section):
    files: FilesConfig | None = None
    """Take the states from files that vLLM or speculators wrote, in place of running the target."""
    tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Token budget of one row, padding included."""
    rows: Auto | Literal["packed", "padded"] = "auto"
    """packed: samples end to end, no padding; padded: right-padded batches of samples of like length.
    auto: packed on a GPU for families that are proven packed and whose kernels are installed.
    """
    workers: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Processes, each with a copy of the target; auto: one for every `target.gpus_per_replica` GPUs, and
    one on a CPU (on Ray one a CPU of the cluster).
    """
    codec: Codec = "none"
    """How states are stored: none; lossless: byte planes + zstd, about 70% of the bytes; fp8: e4m3 with
    a scale a token and tap, half the bytes, lossy.
    """
    shard_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """A shard is closed once it holds this many bytes of states."""


class DrafterConfig(Section):
    layers: Annotated[int, Field(ge=1)] = 5
    """Decoder layers."""
    block_size: Annotated[int, Field(ge=2)] = 16
    """Block: the anchor plus block_size - 1 drafted slots."""
    layer_types: Auto | list[Literal["full_attention", "sliding_attention"]] = "auto"
    """One a layer; auto: all full."""
    sliding_window: Annotated[int, Field(ge=1)] = 2048
    """Window of the sliding layers, in tokens."""
    mask_token_id: Auto | Annotated[int, Field(ge=0)] = "auto"
    """auto: a free row of the embedding, else an unused special token."""
    num_attention_heads: Auto | Annotated[int, Field(ge=1)] = "auto"
    num_key_value_heads: Auto | Annotated[int, Field(ge=1)] = "auto"
    head_dim: Auto | Annotated[int, Field(ge=2)] = "auto"
    intermediate_size: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Shapes; auto: the target's when its head_dim is 64 or 128, else 32 heads, 8 KV heads of 128.
    """
    init_from: str | None = None
    """Warm start: a published DFlash checkpoint (z-lab's or speculators' layout), folder or hub id."""

    @model_validator(mode="after")
    def _one_type_a_layer(self) -> "DrafterConfig":
        if self.layer_types != "auto" and len(self.layer_types) != self.layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.layers} layers; give one a layer"
            )
        return self


class TrainConfig(Section):
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Of first weights, order and anchors; null: the run's `seed`, which the features depend on too."""
    epochs: Annotated[int, Field(ge=1)] = 6
    """Passes over the training samples."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many optimizer steps; the schedule ends there."""
    lr: Annotated[float, Field(gt=0, le=1)] = 6.0e-4
    """Peak learning rate (AdamW, cosine to zero)."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    """Share of the steps in which the rate rises."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""
    anchors_per_sample: Annotated[int, Field(ge=1)] = 512
    """Random anchors, each epoch anew: so many a sample on average, in proportion to its answer's length, and at
    most micro_batch_blocks in one.
    """
    tokens_per_step: Annotated[int, Field(ge=1)] = 32768
    """Target tokens of one optimizer step."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Target tokens of one forward and backward, samples end to end; a longer sample goes alone."""
    micro_batch_blocks: Auto | Annotated[int, Field(ge=1)] = "auto"
    """And no more blocks than this; auto: 512, or anchors_per_sample if that is more."""
    labels: Literal["data", "target"] = "data"
    """data: the text's own token; target: what the target finds most probable there (needs
    features.final: argmax).
    """
    loss: Literal["ce", "kl", "tv"] = "ce"
    """ce: cross-entropy with the labels; kl, tv: divergence from, or distance to, the target's
    distribution (need features.final: state).
    """
    weights: Literal["gamma", "dpace"] = "dpace"
    """dpace: a slot weighs what depends on it, by the probability that the slots before it are accepted
    (D-PACE); gamma: slot k weighs exp(-(k-1)/gamma).
    """
    gamma: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Of weights: gamma. auto: 4 at block 8, 5 at 10, 7 at 16 (the paper), interpolated."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Older ones are deleted."""
    verdict_prompts: Annotated[int, Field(ge=0)] = 32
    """Held-out texts whose tau is measured at 1% of the steps and with each checkpoint; 0: none."""
    processes: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Processes, one a GPU; auto: as many as there are GPUs, and one on a CPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes: ddp: each holds the whole drafter; fsdp: weights and optimizer are shared out
    (FSDP2), on several nodes within each of them.
    """
    recompute: bool = False
    """Make activations again in the backward pass: less memory, about a quarter more time."""
    loggers: list[Literal["tensorboard", "wandb", "trackio"]] = ["tensorboard"]
    """Where curves go besides events.jsonl; tensorboard: RUN/logs. wandb and trackio are extras."""

    @model_validator(mode="after")
    def _gamma_of_gamma(self) -> "TrainConfig":
        if self.gamma != "auto" and self.weights != "gamma":
            raise ValueError(f"gamma {self.gamma} weighs nothing: set weights: gamma with it")
        return self

    @property
    def blocks_together(self) -> int:
        """Blocks of one forward and backward."""
        if self.micro_batch_blocks == "auto":
            return max(512, self.anchors_per_sample)
        return self.micro_batch_blocks

    @model_validator(mode="after")
    def _anchors_fit(self) -> "TrainConfig":
        if self.blocks_together < self.anchors_per_sample:
            raise ValueError(
                f"micro_batch_blocks {self.micro_batch_blocks} is less than anchors_per_sample "
                f"{self.anchors_per_sample}: a sample's blocks are trained on together"
            )
        return self
