"""Every method on every prompt, in the same loop: the baselines, the drafter as chain and as tree, and
the controls.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.config import RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.decode.batch_session import BatchSession
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.forced import forced_gaps
from draftsmith.decode.mtp import MTPHead, MTPProposer, load_mtp
from draftsmith.decode.propose import DraftProposer, LookupProposer, NoProposer, Proposer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import Trace, speculate, speculate_batch
from draftsmith.drafter.checkpoint import load_drafter
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import text_decoder, unembed
from draftsmith.target.taps import decoder_layers

DRAFTED = ("chain", "tree", "untrained", "shuffled")


@dataclass(frozen=True)
class Prompt:
    """What is asked, and where it comes from. `text` is the prompt with the target's answer behind it
    where one is known. `messages` are what `ids` render, `later` the user's turns that follow the
    answer, `origin` file and line; all only of suites.
    """

    suite: str
    sample_id: int
    ids: list[int]
    text: list[int]
    domain: str = ""
    turn: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    later: list[str] = field(default_factory=list)
    origin: str = ""


Answered = tuple[Prompt, dict[str, Trace]]
Follow = Callable[[Prompt, list[int]], Prompt | None]
"""The prompt of the next turn after the autoregressive answer; None when there is none."""


def prompt_of(sample: Sample) -> list[int]:
    """The tokens before the supervised answer."""
    return sample.input_ids[: sample.loss_mask.index(1)]


def measure(
    cfg: RunConfig,
    target: PreTrainedModel,
    checkpoint: Path,
    prompts: list[Prompt],
    eos: list[int],
    progress: Callable[..., None],
    kept: Path,
    *,
    follow: Follow = lambda prompt, answer: None,
) -> list[Answered]:
    """Every method's trace of every prompt and of the turns that follow it, `evaluate.batch` prompts
    at a time. Methods take turns batch by batch, so that machine noise hits all alike. A prompt's
    traces are a line of the file `kept`; those that are there already are not made again.
    """
    decode = _Decoder(cfg, target, checkpoint, eos)
    methods, size = cfg.evaluate.methods, cfg.evaluate.batch
    old, out = _read_kept(kept), []
    progress(len(old) * len(methods))
    decode("ar", prompts[:1], prompts[:1])  # warm up
    others = [*prompts[1:], prompts[0]]
    for i in range(0, len(prompts), size):
        batch, its_others = prompts[i : i + size], others[i : i + size]
        while batch:
            lines = old[len(out) : len(out) + len(batch)]
            answers = [{name: Trace(**line[name]) for name in methods} for line in lines]
            if len(answers) < len(batch):
                made = {name: decode(name, batch, its_others) for name in methods}
                for row in range(len(answers), len(batch)):
                    answers.append({name: made[name][row] for name in methods})
                    _force(target, batch[row], answers[row], cfg.evaluate.temperature > 0)
                _keep(kept, answers[len(lines) :])
            out += zip(batch, answers, strict=True)
            shown = {f"tau_{m}": _running_tau(out, m) for m in methods if m != "ar"}
            progress(len(out) * len(methods), **shown)
            turned = [
                (follow(prompt, traces["ar"].tokens), other)
                for prompt, traces, other in zip(batch, answers, its_others, strict=True)
            ]
            batch = [prompt for prompt, _ in turned if prompt is not None]
            its_others = [other for prompt, other in turned if prompt is not None]
    if not any(traces["ar"].emitted for _, traces in out):
        raise UserError(
            where="evaluate",
            found="no answer of more than one token",
            expected="something to draft",
            remedy="Look at the answers (RUN/data/answers), or use other prompts.",
        )
    return out


class _Decoder:
    """One method on a batch of prompts; `others` are those whose features the control shuffled takes."""

    def __init__(
        self, cfg: RunConfig, target: PreTrainedModel, checkpoint: Path, eos: list[int]
    ) -> None:
        self._cfg, self._target, self._eos = cfg, target, eos
        self._drafters = _drafters(cfg, target, checkpoint)
        self._taps = list(self._drafters["chain"].shape.taps)
        self._head: MTPHead | None = None
        if "mtp" in cfg.evaluate.methods:
            self._head = load_mtp(cfg.target, target)
        text = target.config.get_text_config(decoder=True)
        self._context = getattr(text, "max_position_embeddings", 0) or 0

    def __call__(self, method: str, prompts: list[Prompt], others: list[Prompt]) -> list[Trace]:
        samplings = [self._sampling(prompt) for prompt in prompts]
        ends = [self._end(prompt) for prompt in prompts]
        proposers = [
            self._proposer(method, other, sampling)
            for other, sampling in zip(others, samplings, strict=True)
        ]
        taps, ids = self._taps_of(method), [prompt.ids for prompt in prompts]
        if self._cfg.evaluate.batch > 1:
            session = BatchSession(self._target, taps)
            return speculate_batch(session, ids, proposers, ends, samplings)
        alone = TargetSession(self._target, taps)
        return [speculate(alone, ids[0], proposers[0], ends[0], samplings[0])]

    def _sampling(self, prompt: Prompt) -> Sampling:
        cfg = self._cfg.evaluate
        return Sampling(
            cfg.temperature, cfg.top_p, cfg.top_k,
            seed=self._cfg.seed * 1_000_003 + prompt.sample_id,
        )  # fmt: skip

    def _end(self, prompt: Prompt) -> AnswerEnd:
        cfg = self._cfg.evaluate
        room = max(2, self._context - len(prompt.ids)) if self._context else cfg.max_new_tokens
        return AnswerEnd(
            eos_ids=self._eos,
            max_new_tokens=min(cfg.max_new_tokens, room),
            loop_ngram=cfg.loop_ngram,
        )

    def _taps_of(self, method: str) -> list[int]:
        if method == "mtp":
            return [len(decoder_layers(text_decoder(self._target), "target.model")) - 1]
        return self._taps if method in DRAFTED else []

    def _proposer(self, method: str, other: Prompt, sampling: Sampling) -> Proposer:
        trained, cfg = self._drafters["chain"], self._cfg.evaluate
        if method == "ar":
            return NoProposer()
        if method == "lookup":
            return LookupProposer(trained.shape.block_size - 1)
        if method == "mtp":
            assert self._head is not None, "loaded when mtp is asked for"
            return MTPProposer(self._head, self._target, cfg.mtp_tokens)
        if method == "shuffled":
            features = features_of(self._target, self._taps, other.text)
            return DraftProposer(trained, features, sampling=sampling)
        if method == "tree":
            return DraftProposer(trained, tree_budget=cfg.tree_budget)
        return DraftProposer(self._drafters[method], sampling=sampling)


def _force(
    target: PreTrainedModel, prompt: Prompt, traces: dict[str, Trace], sampled: bool
) -> None:
    """Greedy texts that are not the autoregressive one go through the plain target."""
    for name, trace in traces.items():
        if not sampled and trace.tokens != traces["ar"].tokens:
            gaps = forced_gaps(target, prompt.ids, trace.tokens)
            traces[name] = replace(trace, forced_gaps=gaps)


def _keep(path: Path, answers: list[dict[str, Trace]]) -> None:
    with open(path, "a") as file:
        for traces in answers:
            line = {name: asdict(trace) for name, trace in traces.items()}
            file.write(json.dumps(line) + "\n")


def _read_kept(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an earlier run that was stopped; what follows them is cut off."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    lines = [json.loads(line) for line in whole.splitlines()]
    path.write_bytes(whole + b"\n" if lines else b"")
    return lines


@torch.inference_mode()
def features_of(target: PreTrainedModel, taps: list[int], ids: list[int]) -> Tensor:
    """Features [n, taps, H] of a whole text."""
    _, features = TargetSession(target, taps).prefill(ids)
    return features


def _running_tau(answered: list[Answered], method: str) -> float:
    traces = [traces[method] for _, traces in answered]
    return sum(sum(t.emitted) for t in traces) / max(1, sum(len(t.emitted) for t in traces))


def _drafters(cfg: RunConfig, target: PreTrainedModel, checkpoint: Path) -> dict[str, DFlash]:
    """The trained drafter with the weights an export holds (bf16 values); a random one of its shape, if asked
    for.
    """
    shared = unembed(target)
    options: dict[str, Any] = {"dtype": shared[0].dtype, "device": target.device}
    layers = len(decoder_layers(text_decoder(target), "target.model"))
    trained = load_drafter(
        checkpoint, round_to=torch.bfloat16, num_target_layers=layers, **options
    ).share(*shared)
    if "untrained" not in cfg.evaluate.methods:
        return {"chain": trained}
    twin = DFlash.empty(trained.shape, target.device).init_weights(cfg.train_seed)
    twin = twin.to(**options).eval().requires_grad_(False).share(*shared)
    return {"chain": trained, "untrained": twin}
