"""The configuration: one YAML file a run, any key overridable on the command line. `RunConfig` is
the whole file.

What this version cannot do is not accepted: a value that would be ignored is an error when the file
loads.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

Auto = Literal["auto"]
Codec = Literal["none", "lossless", "fp8"]
SUITES = (
    "held_out", "gsm8k", "math500", "aime24", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench",
    "alpaca", "swe-bench-lite",
)  # fmt: skip
Method = Literal["ar", "lookup", "mtp", "chain", "tree", "untrained", "shuffled"]


S3_ADDRESS = r"s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/.*)?"


def _greedy(temperature: float) -> float:
    if temperature != 0:
        raise ValueError("0.0: this version decodes greedily")
    return temperature


Greedy = Annotated[float, AfterValidator(_greedy)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class TargetConfig(_Model):
    model: str
    """Hub id or local folder of the target."""
    revision: str = "main"
    """Branch, tag or commit of a hub model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the target."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU when there is one."""
    gpus_per_replica: Annotated[int, Field(ge=1)] = 1
    """GPUs that hold one copy of the target."""


class FiltersConfig(_Model):
    min_messages: Annotated[int, Field(ge=1)] = 1
    """Fewest messages of a conversation that is kept."""
    max_messages: Annotated[int, Field(ge=1)] | None = None
    """Most messages."""
    min_chars: Annotated[int, Field(ge=0)] = 0
    """Least text, over all messages."""
    max_chars: Annotated[int, Field(ge=1)] | None = None
    """Most text."""
    match: str | None = None
    """Regular expression that some message must contain."""
    match_none: str | None = None
    """Regular expression that no message may contain."""

    @field_validator("match", "match_none")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"a regular expression ({error})") from None
        return pattern


class SourceConfig(_Model):
    path: str
    """`.jsonl`, `.json` (an array), `.parquet` or `.arrow`, the first two also `.gz` or `.zst`; or
    `hub:OWNER/NAME`, or `hub:FOLDER`, through the `datasets` library.
    """
    format: Literal["auto", "messages", "sharegpt", "alpaca", "traces"] = "auto"
    """messages: OpenAI's `{"messages": [...], "tools": [...]}`; sharegpt; alpaca; traces: runs of
    SWE-agent or OpenHands; auto: guessed from the first row, and said.
    """
    name: str | None = None
    """Name in reports; default: the file's name, or a line's own `source`."""
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the file's prompts that is kept, chosen by hash."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """At most this many of its conversations, chosen by hash."""
    filters: FiltersConfig = FiltersConfig()
    """Which of its conversations are kept."""
    subset: str | None = None
    """Of a hub data set: its configuration."""
    split: str = "train"
    """Of a hub data set: its split."""
    revision: str = "main"
    """Of a hub data set: branch, tag or commit."""


class PrepareConfig(_Model):
    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Where conversations come from."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the prompts kept for evaluation only, by a hash of the prompt."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """At most this many prompts of the training split, chosen by hash."""
    max_held_out: Annotated[int, Field(ge=1)] | None = None
    """At most this many held-out prompts, chosen by hash."""
    bad_lines: Literal["refuse", "skip"] = "refuse"
    """refuse: stop at the first damaged line; skip: leave it out, count it, list it in left-out.jsonl."""
    max_line_bytes: Annotated[int, Field(ge=1024)] = 1 << 24
    """A longer line counts as damaged."""
    near_duplicates: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Drop a question whose words are this similar (Jaccard, by MinHash) to an earlier one's; null: no."""
    decontaminate: list[str] = []
    """Files of evaluation prompts: a conversation that shares 13 words in a row with one is dropped."""
    workers: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Processes; auto: one a core."""


class RegenerateConfig(_Model):
    enabled: bool = True
    """Replace the answers of every conversation by the target's own."""
    servers: list[str] = []
    """URLs of OpenAI-compatible servers of the target (vLLM, SGLang, others); none: in process."""
    launch: str | None = None
    """Command that starts such a server here, e.g. `vllm serve TARGET`; `--port N` is added, and
    `{replica}` stands for its number. It is stopped when all is answered.
    """
    replicas: Annotated[int, Field(ge=1)] = 1
    """How often `launch` is run."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest answer."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Of training answers, as the target is served; 0: greedy. Held-out answers are always greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sampling keeps the most probable tokens that hold this much."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sampling keeps this many of the most probable tokens; 0: all."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    """Requests at a time to one server."""
    timeout_s: Annotated[float, Field(gt=0)] = 600
    """Longest wait for one answer."""
    retries: Annotated[int, Field(ge=0)] = 6
    """How often a request is repeated after 429, 5xx, or no answer, waiting twice as long each time."""
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the questions that may stay without an answer; more is a fault."""
    wait_s: Annotated[float, Field(gt=0)] = 900
    """Seconds a launched server may take to start."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """In process: prompts decoded together."""
    answers_per_file: Annotated[int, Field(ge=1)] = 1024
    """Answers in one file: what a killed worker loses at most, in process."""
    workers: Auto | Annotated[int, Field(ge=1)] = "auto"
    """In process: as extract.workers."""
    loop_ngram: Annotated[int, Field(ge=2)] | None = None
    """Cut an answer at its first repeated n-gram of this many tokens; null: never."""

    @model_validator(mode="after")
    def _one_way(self) -> "RegenerateConfig":
        if self.servers and self.launch:
            raise ValueError("give regenerate.servers or regenerate.launch, not both")
        if not self.temperature and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError("top_p and top_k need a regenerate.temperature above 0: 0 is greedy")
        return self

    @property
    def by_server(self) -> bool:
        """Whether servers answer, rather than this process."""
        return bool(self.servers or self.launch)


class TokenizeConfig(_Model):
    max_length_tokens: Annotated[int, Field(ge=8)] = 4096
    """Longest sample."""
    too_long: Literal["truncate", "drop", "split"] = "truncate"
    """What happens to longer ones; split: at turns, each part begins with the system message."""
    turns: Literal["last", "all"] = "last"
    """Which answers of a conversation are supervised (and regenerated)."""
    template_kwargs: dict[str, Any] = {"enable_thinking": False}
    """Variables for the chat template, in training as in serving."""
    workers: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Processes; auto: one a core."""

    @field_validator("template_kwargs")
    @classmethod
    def _plain(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(kwargs)
        except TypeError as error:
            raise ValueError(f"plain values only; quote dates ({error})") from None
        return kwargs


class FeaturesConfig(_Model):
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
                raise ValueError(f"taps are repeated in {taps}; give each layer once")
            if min(taps) < 0:
                raise ValueError(f"tap {min(taps)} is negative; taps count layers from 0")
            if taps != sorted(taps):
                raise ValueError(f"taps {taps} must ascend")
        return taps

    @field_validator("store")
    @classmethod
    def _known_place(cls, store: str | None) -> str | None:
        if store is None or "://" not in store:
            return store
        if not re.fullmatch(S3_ADDRESS, store):
            raise ValueError(f"{store}: a local folder or s3://bucket/prefix")
        return store


class FilesConfig(_Model):
    path: str
    """Folder of *.safetensors: vLLM's shared_storage_path, or DATA/hidden_states of speculators."""
    layer_ids: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """The ids that the server was given (eagle_aux_hidden_state_layer_ids), in order: id k is the
    state after k layers, so tap i is id i + 1 and features.final is id N.
    """
    codec: Literal["none", "fp8"] = "none"
    """fp8: files of hs-connectors' FP8 connector, a scale a token."""


class ExtractConfig(_Model):
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


class DrafterConfig(_Model):
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


class TrainConfig(_Model):
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
    """Random anchors drawn in each sample, each epoch anew."""
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
    weights: Literal["gamma", "dpace"] = "gamma"
    """gamma: slot k weighs exp(-(k-1)/gamma); dpace: by the probability that the slots before it are
    accepted (D-PACE).
    """
    gamma: Auto | Annotated[float, Field(gt=0)] = "auto"
    """auto: 4 at block 8, 5 at 10, 7 at 16 (the paper), interpolated."""
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


class EvaluateConfig(_Model):
    suites: Annotated[list[str], Field(min_length=1)] = ["held_out"]
    """Prompt sets: held_out, benchmarks by name (docs/decoding.md), or files of your own (.jsonl)."""
    data: dict[str, str] = {}
    """A benchmark's file (.jsonl, .jsonl.gz, .parquet) in place of the hub's, by its name."""
    thinking: bool | None = None
    """The template's enable_thinking for benchmarks; null: as tokenize.template_kwargs says."""
    drafter: str | None = None
    """Measure this published checkpoint (folder or hub id) in place of the trained drafter."""
    methods: Annotated[list[Method], Field(min_length=1)] = ["ar", "lookup", "chain"]
    """ar and lookup need no drafter; mtp is the target's own head, where its checkpoint has one;
    untrained and shuffled (another sample's features) are controls.
    """
    mtp_tokens: Annotated[int, Field(ge=1)] = 3
    """Tokens that the target's own head drafts a round."""
    max_prompts: Annotated[int, Field(ge=1)] = 128
    """Prompts a suite, chosen by hash."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 2048
    """Longest answer; the target's context may end it earlier."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy. Above, every method samples the target's distribution, exactly."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sampling keeps the most probable tokens that hold this much."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sampling keeps this many of the most probable tokens; 0: all."""
    tree_budget: Annotated[int, Field(ge=1)] = 64
    """Nodes of a draft tree, the root not counted; for the method tree."""
    dtype: Literal["target", "float32"] = "target"
    """Compute dtype of target and drafter in evaluation."""
    loop_ngram: Annotated[int, Field(ge=2)] | None = None
    """Cut every method's answer at its first repeated n-gram of this many tokens; null: never."""

    @field_validator("suites")
    @classmethod
    def _known(cls, suites: list[str]) -> list[str]:
        for name in suites:
            if name not in SUITES and not name.endswith((".jsonl", ".jsonl.gz")):
                near = difflib.get_close_matches(name, SUITES, 1)
                raise ValueError(
                    f"unknown suite {name!r}"
                    + (f" (did you mean {near[0]}?)" if near else "")
                    + f"; expected {', '.join(SUITES)}, or a .jsonl file"
                )
        if len(set(suites)) != len(suites):
            raise ValueError(f"suites are repeated in {suites}")
        return suites

    @model_validator(mode="after")
    def _data_is_of_suites(self) -> "EvaluateConfig":
        if unknown := sorted(set(self.data) - set(self.suites) | {"held_out"} & set(self.data)):
            raise ValueError(f"data: {unknown[0]} is no benchmark among suites {self.suites}")
        return self

    @field_validator("methods")
    @classmethod
    def _with_ar(cls, methods: list[Method]) -> list[Method]:
        if "ar" not in methods:
            raise ValueError("methods must include ar: every other method is compared with it")
        if len(set(methods)) != len(methods):
            raise ValueError(f"methods are repeated in {methods}")
        return methods


class ExportConfig(_Model):
    layout: Literal["zlab"] = "zlab"


class EngineConfig(_Model):
    kind: Literal["local", "ray"] = "local"
    """Who runs the workers of extract, and of regenerate in process: local: one a GPU of this machine; ray:
    actors of a Ray cluster (an extra), on GPUs unless target.device is cpu.
    """
    address: str | None = None
    """Of the Ray cluster: auto (a node of it is here), HOST:6379, or ray://HOST:10001; null: started here."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for a first worker's place on the Ray cluster."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(
            r"auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}", address
        ):
            raise ValueError(f"{address}: auto, HOST:PORT or ray://HOST:PORT")
        return address

    @model_validator(mode="after")
    def _address_is_rays(self) -> "EngineConfig":
        if self.address is not None and self.kind != "ray":
            raise ValueError("engine.address needs engine.kind: ray")
        return self


class SuperviseConfig(_Model):
    enabled: bool = True
    """`draftsmith run` looks after a worker; false: it does the work in its own process."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Restarts in a row that come no further than the try before."""
    backoff_s: Annotated[float, Field(ge=0)] = 10.0
    """Before a restart; doubled while restarts come no further."""
    stall_s: Annotated[float, Field(gt=0)] = 600.0
    """Without progress a run counts as stalled: its stacks are written down."""
    restart_stalled: bool = True
    """Start a stalled worker again after as long a time."""


class RunConfig(_Model):
    run: str
    """The run's folder."""
    mirror: str | None = None
    """s3://bucket/prefix: data, checkpoints, reports and the export are copied there as they appear, and
    an empty `run:` folder is filled from there. Features are not: see features.store.
    """
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    target: TargetConfig
    prepare: PrepareConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    tokenize: TokenizeConfig = TokenizeConfig()
    features: FeaturesConfig = FeaturesConfig()
    extract: ExtractConfig = ExtractConfig()
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    engine: EngineConfig = EngineConfig()
    supervise: SuperviseConfig = SuperviseConfig()

    @field_validator("mirror")
    @classmethod
    def _is_on_s3(cls, mirror: str | None) -> str | None:
        if mirror is not None and not re.fullmatch(S3_ADDRESS, mirror):
            raise ValueError(f"{mirror}: s3://bucket/prefix")
        return mirror

    @model_validator(mode="after")
    def _held_out_thinks_as_tokenized(self) -> "RunConfig":
        asked, said = self.evaluate.thinking, self.tokenize.template_kwargs.get("enable_thinking")
        if "held_out" in self.evaluate.suites and asked not in (None, said):
            raise ValueError(
                f"evaluate.thinking {asked}: held_out prompts were tokenized with enable_thinking "
                f"{said}; leave held_out out of evaluate.suites, or set tokenize.template_kwargs"
            )
        return self

    @model_validator(mode="after")
    def _store_is_beside_the_mirror(self) -> "RunConfig":
        if self.mirror is None or "://" not in self.store:
            return self
        mirror, store = self.mirror.rstrip("/"), self.store.rstrip("/") + "/"
        mine = [f"{mirror}/{name}/" for name in ("data", "checkpoints", "eval", "export")]
        if mirror + "/" == store or any(store.startswith(folder) for folder in mine):
            raise ValueError(
                f"features.store {self.store} lies among the files of mirror {mirror}; "
                f"use {mirror}/features or another prefix"
            )
        return self

    @model_validator(mode="after")
    def _store_is_no_stages_folder(self) -> "RunConfig":
        if "://" in self.store:
            return self
        mine = {self.root / name for name in ("data", "checkpoints", "eval", "export")}
        store = Path(self.store).absolute()
        if (
            any(store.is_relative_to(folder.absolute()) for folder in mine)
            or store == self.root.absolute()
        ):
            raise ValueError(
                f"features.store {self.store} lies in a folder that another stage remakes"
            )
        return self

    @model_validator(mode="after")
    def _turns_are_asked_of_servers(self) -> "RunConfig":
        asked = self.regenerate
        if asked.enabled and self.tokenize.turns == "all" and not asked.by_server:
            raise ValueError(
                "tokenize.turns: all needs regenerate.servers or regenerate.launch, or "
                "regenerate.enabled: false; in process only the last answer is regenerated"
            )
        return self

    @model_validator(mode="after")
    def _losses_have_what_they_compare_with(self) -> "RunConfig":
        train, final = self.train, self.features.final
        if train.labels == "target" and (train.loss != "ce" or final != "argmax"):
            raise ValueError("train.labels: target needs features.final: argmax and train.loss: ce")
        if train.loss != "ce" and final != "state":
            raise ValueError(f"train.loss: {train.loss} needs features.final: state")
        return self

    @model_validator(mode="after")
    def _live_runs_the_target(self) -> "RunConfig":
        if self.features.source == "live" and self.extract.files is not None:
            raise ValueError("features.source: live runs the target; leave out extract.files")
        return self

    @model_validator(mode="after")
    def _files_hold_no_argmax(self) -> "RunConfig":
        if self.extract.files is not None and self.features.final == "argmax":
            raise ValueError("features.final: argmax needs the target; extract.files hold states")
        return self

    @property
    def train_seed(self) -> int:
        """What training draws by."""
        return self.seed if self.train.seed is None else self.train.seed

    @property
    def root(self) -> Path:
        """The run's folder as a path."""
        return Path(self.run).expanduser()

    @property
    def store(self) -> str:
        """Where the features are: a path or an s3:// address."""
        store = self.features.store
        if store is None:
            return str(self.root / "features")
        return store if "://" in store else str(Path(store).expanduser())
