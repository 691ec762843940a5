"""Every method on every prompt, in the same loop: the baselines, the drafter as chain and as tree, and
the controls.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.config import RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.propose import DraftProposer, LookupProposer, NoProposer, Proposer
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import Trace, speculate
from draftsmith.drafter.checkpoint import load_drafter
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import text_decoder, unembed
from draftsmith.target.taps import decoder_layers

DRAFTED = ("chain", "tree", "untrained", "shuffled")


def prompt_of(sample: Sample) -> list[int]:
    """The tokens before the supervised answer."""
    return sample.input_ids[: sample.loss_mask.index(1)]


def measure(
    cfg: RunConfig,
    target: PreTrainedModel,
    checkpoint: Path,
    prompts: list[Sample],
    eos: list[int],
    progress: Callable[..., None],
    kept: Path,
) -> dict[str, list[Trace]]:
    """Every method's trace of every prompt. Methods take turns prompt by prompt, so that machine
    noise hits all alike. A prompt's traces are a line of the file `kept`; those that are there
    already are not made again.
    """
    drafters = _drafters(cfg, target, checkpoint)
    shape = drafters["chain"].shape
    block_size, taps = shape.block_size, list(shape.taps)
    traces: dict[str, list[Trace]] = {method: [] for method in cfg.evaluate.methods}

    def decode(method: str, sample: Sample, other: Sample) -> Trace:
        sampling = Sampling(
            cfg.evaluate.temperature,
            cfg.evaluate.top_p,
            cfg.evaluate.top_k,
            seed=cfg.seed * 1_000_003 + sample.sample_id,
        )
        proposer = proposer_for(method, other, sampling)
        end = AnswerEnd(
            eos_ids=eos,
            max_new_tokens=cfg.evaluate.max_new_tokens,
            loop_ngram=cfg.evaluate.loop_ngram,
        )
        session = TargetSession(target, taps if method in DRAFTED else [])
        return speculate(session, prompt_of(sample), proposer, end, sampling)

    def proposer_for(method: str, other: Sample, sampling: Sampling) -> Proposer:
        trained = drafters["chain"]
        if method == "ar":
            return NoProposer()
        if method == "lookup":
            return LookupProposer(block_size - 1)
        if method == "shuffled":
            return DraftProposer(trained, features_of(target, taps, other), sampling=sampling)
        if method == "tree":
            return DraftProposer(trained, tree_budget=cfg.evaluate.tree_budget)
        return DraftProposer(drafters[method], sampling=sampling)

    for line in _read_kept(kept)[: len(prompts)]:
        for method in cfg.evaluate.methods:
            traces[method].append(Trace(**line[method]))
    done = sum(map(len, traces.values()))
    progress(done)
    decode("ar", prompts[0], prompts[0])  # warm up
    for i, sample in list(enumerate(prompts))[len(traces["ar"]) :]:
        other = prompts[(i + 1) % len(prompts)]
        for method in cfg.evaluate.methods:
            traces[method].append(decode(method, sample, other))
        with open(kept, "a") as file:
            file.write(json.dumps({name: asdict(mine[i]) for name, mine in traces.items()}) + "\n")
        done += len(traces)
        shown = {f"tau_{m}": _running_tau(traces[m]) for m in cfg.evaluate.methods if m != "ar"}
        progress(done, **shown)
    if not any(trace.emitted for trace in traces["ar"]):
        raise UserError(
            where="evaluate",
            found="no answer of more than one token",
            expected="something to draft",
            remedy="Look at the answers (RUN/data/answers), or use other prompts.",
        )
    return traces


def _read_kept(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an earlier run that was stopped; what follows them is cut off."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    lines = [json.loads(line) for line in whole.splitlines()]
    path.write_bytes(whole + b"\n" if lines else b"")
    return lines


@torch.inference_mode()
def features_of(target: PreTrainedModel, taps: list[int], sample: Sample) -> Tensor:
    """Features [n, taps, H] of a whole sample, its answer included."""
    _, features = TargetSession(target, taps).prefill(sample.input_ids)
    return features


def _running_tau(traces: list[Trace]) -> float:
    return sum(sum(t.emitted) for t in traces) / max(1, sum(len(t.emitted) for t in traces))


def _drafters(cfg: RunConfig, target: PreTrainedModel, checkpoint: Path) -> dict[str, DFlash]:
    """The trained drafter with the weights an export holds (bf16 values), and its untrained twin."""
    shared = unembed(target)
    options: dict[str, Any] = {"dtype": shared[0].dtype, "device": target.device}
    layers = len(decoder_layers(text_decoder(target), "target.model"))
    trained = load_drafter(
        checkpoint, round_to=torch.bfloat16, num_target_layers=layers, **options
    ).share(*shared)
    twin = (
        DFlash(trained.shape)
        .init_weights(cfg.train_seed)
        .to(**options)
        .eval()
        .requires_grad_(False)
        .share(*shared)
    )
    return {"chain": trained, "untrained": twin}
