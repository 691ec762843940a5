"""The configuration: one YAML file a run, any key overridable on the command line. `RunConfig` is
the whole file.

What this version cannot do is not accepted: a value that would be ignored is an error when the file
loads.
"""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from draftsmith.core import UserError

Auto = Literal["auto"]
Method = Literal["ar", "lookup", "chain", "untrained", "shuffled"]


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
    gpus_per_replica: Literal[1] = 1
    """GPUs that hold one copy of the target."""


class SourceConfig(_Model):
    path: str
    """A JSONL file, `.jsonl` or `.jsonl.gz`."""
    format: Literal["messages"] = "messages"
    """messages: one OpenAI-style `{"messages": [...], "tools": [...]}` a line."""
    name: str | None = None
    """Name in reports; default: the file's name, or a line's own `source`."""
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the file's prompts that is kept, chosen by hash."""


class PrepareConfig(_Model):
    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Where conversations come from."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the prompts kept for evaluation only, by a hash of the prompt."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """At most this many prompts of the training split, chosen by hash."""
    max_held_out: Annotated[int, Field(ge=1)] | None = None
    """At most this many held-out prompts, chosen by hash."""


class RegenerateConfig(_Model):
    enabled: bool = True
    """Replace the last answer of every conversation by the target's own."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest answer."""
    temperature: Greedy = 0.0
    """Greedy."""
    servers: Annotated[list[str], Field(max_length=0)] = []
    """OpenAI-compatible servers; this version answers in process only."""
    launch: None = None
    """Command that starts a server a replica; not in this version."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Prompts decoded together."""
    answers_per_file: Annotated[int, Field(ge=1)] = 1024
    """Answers in one file: what a killed run loses at most."""
    loop_ngram: Annotated[int, Field(ge=2)] | None = None
    """Cut an answer at its first repeated n-gram of this many tokens; null: never."""


class TokenizeConfig(_Model):
    max_length_tokens: Annotated[int, Field(ge=8)] = 4096
    """Longest sample."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to longer ones."""
    template_kwargs: dict[str, Any] = {"enable_thinking": False}
    """Variables for the chat template, in training as in serving."""

    @field_validator("template_kwargs")
    @classmethod
    def _plain(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(kwargs)
        except TypeError as error:
            raise ValueError(f"plain values only; quote dates ({error})") from None
        return kwargs


class FeaturesConfig(_Model):
    source: Literal["auto", "store"] = "auto"
    """store: extracted once to disk, read in every epoch."""
    taps: Auto | list[int] = "auto"
    """0-based decoder layers whose raw output is captured; auto: z-lab's formula."""
    num_taps: Annotated[int, Field(ge=1)] = 5
    """How many, for `taps: auto`."""
    final: Literal["none", "state", "argmax"] = "none"
    """Also keep the last layer's output before the final norm, or the target's argmax."""
    store: str | None = None
    """Folder of the store; null: RUN/features."""
    max_bytes: None = None
    """Bound on the store's size; not in this version."""
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
    def _local(cls, store: str | None) -> str | None:
        if store is not None and "://" in store:
            raise ValueError(f"{store}: only local folders are supported by this version")
        return store


class ExtractConfig(_Model):
    tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Token budget of one batch, padding included."""
    codec: Literal["none"] = "none"
    """How shards are compressed."""
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

    @model_validator(mode="after")
    def _one_type_a_layer(self) -> "DrafterConfig":
        if self.layer_types != "auto" and len(self.layer_types) != self.layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.layers} layers; give one a layer"
            )
        return self


class TrainConfig(_Model):
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
    """Target tokens of one forward, padding included; a longer sample goes alone."""
    labels: Literal["data"] = "data"
    """data: the text's own token."""
    loss: Literal["ce"] = "ce"
    weights: Literal["gamma"] = "gamma"
    """gamma: slot k weighs exp(-(k-1)/gamma)."""
    gamma: Auto | Annotated[float, Field(gt=0)] = "auto"
    """auto: 4 at block 8, 5 at 10, 7 at 16 (the paper), interpolated."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Older ones are deleted."""


class EvaluateConfig(_Model):
    suites: Annotated[list[Literal["held_out"]], Field(min_length=1)] = ["held_out"]
    """Prompt sets."""
    methods: Annotated[list[Method], Field(min_length=1)] = ["ar", "lookup", "chain"]
    """ar and lookup need no drafter; untrained and shuffled (another sample's features) are
    controls.
    """
    max_prompts: Annotated[int, Field(ge=1)] = 128
    """Prompts a suite, chosen by hash."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 2048
    temperature: Greedy = 0.0
    """Greedy."""
    tree_budget: Annotated[int, Field(ge=1)] = 64
    """Nodes of a draft tree, the root not counted; used by the method tree, which this version
    lacks.
    """
    dtype: Literal["target", "float32"] = "target"
    """Compute dtype of target and drafter in evaluation."""
    loop_ngram: Annotated[int, Field(ge=2)] | None = None
    """Cut every method's answer at its first repeated n-gram of this many tokens; null: never."""

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
    kind: Literal["local"] = "local"


class RunConfig(_Model):
    run: str
    """The run's folder."""
    mirror: None = None
    """Where data and checkpoints are copied to; not in this version."""
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

    @model_validator(mode="after")
    def _store_is_no_stages_folder(self) -> "RunConfig":
        mine = {self.root / name for name in ("data", "checkpoints", "eval", "export")}
        store = self.store.absolute()
        if (
            any(store.is_relative_to(folder.absolute()) for folder in mine)
            or store == self.root.absolute()
        ):
            raise ValueError(
                f"features.store {self.store} lies in a folder that another stage remakes"
            )
        return self

    @property
    def root(self) -> Path:
        """The run's folder as a path."""
        return Path(self.run).expanduser()

    @property
    def store(self) -> Path:
        """Where the features are."""
        return (
            Path(self.features.store).expanduser()
            if self.features.store
            else self.root / "features"
        )


class _Strict(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not silently the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key '{key}' is given twice {node.start_mark}")
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """The YAML at `path` with dotted-key overrides applied. Raises UserError, naming the key, for
    anything wrong.
    """
    try:
        data = yaml.load(path.read_text(), _Strict)
    except FileNotFoundError:
        raise UserError(
            where=str(path),
            found="no such file",
            expected="a YAML configuration",
            remedy="Check the path.",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(
            where=str(path),
            found=f"text that is not YAML ({' '.join(str(error).split())})",
            expected="a YAML mapping",
            remedy="Mend the file.",
        ) from None
    if not isinstance(data, dict):
        raise UserError(
            where=str(path),
            found=f"a {type(data).__name__}",
            expected="a YAML mapping",
            remedy="See recipes/ for examples.",
        )
    return with_overrides(data, overrides or {}, where=str(path))


def with_overrides(data: dict[str, Any], overrides: dict[str, Any], *, where: str) -> RunConfig:
    """RunConfig from a plain dict and dotted keys; every fault in one UserError."""
    for key, value in overrides.items():
        _set(data, key, value)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        faults: dict[str, tuple[str, list[str]]] = {}
        for fault in error.errors():
            key, found, expected = _describe(fault)
            faults.setdefault(key, (found, []))[1].append(expected)
        raise UserError(
            where=f"{where}: {', '.join(faults)}",
            found="; ".join(found for found, _ in faults.values()),
            expected="; ".join(" or ".join(dict.fromkeys(wanted)) for _, wanted in faults.values()),
            remedy="Correct the file or the command line.",
        ) from None


def _describe(fault: Any) -> tuple[str, str, str]:
    *parents, last = fault["loc"] or ("",)
    unknown = fault["type"] == "extra_forbidden"
    # pydantic adds the tried alternatives of a union to the path: those are no keys
    names = [part for part in parents if isinstance(part, int) or str(part).isidentifier()]
    if unknown or isinstance(last, int) or str(last).isidentifier():
        names.append(last)
    key = ".".join(str(part) for part in names)
    if unknown:
        known = _known_keys(names[:-1])
        close = difflib.get_close_matches(str(last), known, n=1)
        hint = f"{close[0]} (did you mean that?)" if close else "one of " + ", ".join(known)
        return key, f"the unknown key '{last}'", hint
    if fault["type"] == "missing":
        return key, "nothing", "a value: the key is required"
    return key, repr(fault["input"])[:200], fault["msg"].removeprefix("Value error, ")


def _known_keys(path: list[Any]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        if isinstance(part, int):
            model = SourceConfig
        elif isinstance(model.model_fields[part].annotation, type):
            model = model.model_fields[part].annotation
    return list(model.model_fields)


def describe(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """A line a key for --help: name, default, what it is."""
    lines = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, _Model):
            lines += describe(kind, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else json.dumps(field.default)
        text = " ".join((field.description or "").split())
        lines.append(
            f"  --{prefix}{name:<{max(1, 32 - len(prefix))}} {default:<14} {text}".rstrip()
        )
        if name == "sources":
            lines += describe(SourceConfig, f"{prefix}{name}.0.")
    return lines


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    node: Any = data
    try:
        for part in parents:
            if isinstance(node, list):
                node = node[int(part)]
            else:
                # a mapping's own default, such as template_kwargs, is kept beside the new key
                default = TokenizeConfig().template_kwargs if part == "template_kwargs" else {}
                node = node.setdefault(part, dict(default))
        if isinstance(node, list):
            node[int(leaf)] = value
        else:
            node[leaf] = value
    except (IndexError, ValueError, TypeError, AttributeError):
        raise UserError(
            where=f"--{key}",
            found="a key with nothing at that place",
            expected="a config key",
            remedy="See --help.",
        ) from None
