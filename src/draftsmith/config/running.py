"""What is measured, and who runs it all: evaluate, export, engine, supervise."""

import difflib
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.config.base import Section

SUITES = (
    "held_out", "gsm8k", "math500", "aime24", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench",
    "alpaca", "swe-bench-lite", "bfcl",
)  # fmt: skip
Method = Literal["ar", "lookup", "mtp", "chain", "tree", "untrained", "shuffled"]


class EvaluateConfig(Section):
    suites: Annotated[list[str], Field(min_length=1)] = ["held_out"]
    """Prompt sets: held_out, benchmarks by name (docs/decoding.md), or files of your own (.jsonl)."""
    data: dict[str, str] = {}
    """A benchmark's file (.jsonl, .json of a row a line, .jsonl.gz, .parquet) in place of the hub's, by its name."""
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
    batch: Annotated[int, Field(ge=1)] = 1
    """Prompts decoded at once. More than one: methods ar and chain only, on attention and Gated DeltaNet."""
    max_prompts: Annotated[int, Field(ge=1)] = 128
    """Prompts a suite, chosen by hash."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 2048
    """Longest answer; the target's context may end it earlier. Two at least: the first token is the
    prompt's, and no round makes it.
    """
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy. Above, every method samples the target's distribution, exactly."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sampling keeps the most probable tokens that hold this much."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sampling keeps this many of the most probable tokens; 0: all."""
    tree_budget: Annotated[int, Field(ge=1, le=1024)] = 64
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
            raise ValueError("each suite once")
        return suites

    @model_validator(mode="after")
    def _data_is_of_suites(self) -> "EvaluateConfig":
        if unknown := sorted(set(self.data) - set(self.suites) | {"held_out"} & set(self.data)):
            raise ValueError(
                f"data of {unknown[0]}, which is no benchmark among suites {self.suites}; expected "
                "names of suites that come from the hub"
            )
        return self

    @model_validator(mode="after")
    def _batches_are_chains(self) -> "EvaluateConfig":
        alone = [method for method in self.methods if method not in ("ar", "chain")]
        if self.batch > 1 and alone:
            raise ValueError(
                f"batch: {self.batch} prompts at once with methods {alone}; expected ar and chain "
                "only, or batch: 1"
            )
        return self

    @field_validator("methods")
    @classmethod
    def _with_ar(cls, methods: list[Method]) -> list[Method]:
        if "ar" not in methods:
            raise ValueError("methods must include ar: every other method is compared with it")
        if len(set(methods)) != len(methods):
            raise ValueError("each method once")
        return methods


class ExportConfig(Section):
    layout: Literal["zlab"] = "zlab"


class EngineConfig(Section):
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


class SuperviseConfig(Section):
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
