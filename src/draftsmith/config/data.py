"""The target, and what becomes tokens: prepare, regenerate, tokenize."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from draftsmith.config.base import Auto, Section


def _greedy(temperature: float) -> float:
    if temperature != 0:
        raise ValueError("0.0: this version decodes greedily")
    return temperature


Greedy = Annotated[float, AfterValidator(_greedy)]


class TargetConfig(Section):
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


class FiltersConfig(Section):
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


class SourceConfig(Section):
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


class PrepareConfig(Section):
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


class RegenerateConfig(Section):
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


class TokenizeConfig(Section):
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
