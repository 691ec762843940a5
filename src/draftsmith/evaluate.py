"""The evaluate stage: what the drafter is worth on held-out prompts, in the real loop, beside
baselines and controls.

ar: one token a call. lookup: prompt lookup. chain: the trained drafter. Controls: untrained (the
same network before training) and shuffled (the trained one fed another sample's features); a
drafter that does not beat both has learnt nothing from the features. All methods run the same loop
and end answers by the same rule.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import draftsmith.tokenize as tokenize_stage
from draftsmith import files, report, train
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, Sample, StageResult, UserError
from draftsmith.decode.ends import AnswerEnd
from draftsmith.decode.propose import DraftProposer, LookupProposer, NoProposer, Proposer
from draftsmith.decode.session import TargetSession
from draftsmith.decode.speculate import Trace, speculate
from draftsmith.drafter.checkpoint import find_drafter, load_drafter, read_shape
from draftsmith.drafter.config import check_belongs
from draftsmith.drafter.model import DFlash
from draftsmith.metrics import summarize
from draftsmith.monitor.state import StageReport, stage_report
from draftsmith.target.load import (
    TargetInfo,
    device_of,
    eos_ids,
    inspect_target,
    load_target,
    load_tokenizer,
    text_decoder,
    unembed,
)
from draftsmith.target.taps import decoder_layers

DRAFTED = ("chain", "untrained", "shuffled")
EXAMPLES = 3  # texts shown in the report
TRACES = "traces.json"


def folder(cfg: RunConfig) -> Path:
    """Where the report goes."""
    return cfg.root / "eval"


def run(cfg: RunConfig) -> StageResult:
    """Measure every method on every suite; write report.json and report.html. FaultFound when
    greedy text differs.
    """
    out = folder(cfg)
    tokens = tokenize_stage.finished(cfg)
    dtype_name = cfg.target.dtype if cfg.evaluate.dtype == "target" else cfg.evaluate.dtype
    with stage_report(cfg.root, "evaluate") as stage:
        info, tokenizer = inspect_target(cfg.target), load_tokenizer(cfg.target)
        drafter, digest, steps = _drafter(cfg, info)
        inputs = {
            "drafter": digest,
            "tokens": tokens["digest"],
            "seed": cfg.seed,
            "compute_dtype": dtype_name,
            "device": device_of(cfg.target).type,
            **cfg.evaluate.model_dump(exclude={"tree_budget", "drafter"}),
        }
        manifest = manifests.begin(out, "eval/1", inputs, remake=True)
        if manifest["complete"]:
            _refuse_mismatches(json.loads((out / "report.json").read_text()), out)
            return StageResult("evaluate", str(out), skipped=True, summary=manifest["counts"])
        prompts = held_out_prompts(cfg, tokens)
        dtype = getattr(torch, dtype_name)
        target = load_target(cfg.target, dtype=dtype)
        eos = eos_ids(tokenizer, cfg.target)
        stage.working(len(prompts) * len(cfg.evaluate.methods), "answers")
        traces = measure(cfg, target, drafter, prompts, eos, stage)
        described = {**asdict(read_shape(drafter, info.num_layers)), "steps": steps}
        result = _report(cfg, info.identity(), prompts, traces, tokenizer, described, dtype)
        files.write_json(out / "report.json", result)
        files.write_json(out / TRACES, traces_json(prompts, traces))
        losses = report.read_losses(cfg.root)
        files.write_atomic(
            out / "report.html", lambda path: path.write_text(report.render_html(result, losses))
        )
        entries = {
            name: {"sha256": files.file_digest(out / name), "bytes": (out / name).stat().st_size}
            for name in ("report.json", "report.html", TRACES)
        }
        methods = result["suites"][0]["methods"]
        manifest = manifests.finish(
            out, manifest, entries, {f"tau_{name}": m["tau_pooled"] for name, m in methods.items()}
        )
        print(report.table(result))
        print(f"report: {out / 'report.html'}")
        _refuse_mismatches(result, out)
    return StageResult("evaluate", str(out), summary=manifest["counts"])


def _drafter(cfg: RunConfig, info: TargetInfo) -> tuple[Path, str, int | None]:
    """The checkpoint to measure, its digest, and its training steps where they are known."""
    if cfg.evaluate.drafter is None:
        trained = train.finished(cfg)
        return last_checkpoint(cfg), trained["digest"], trained["counts"]["steps"]
    path = find_drafter(cfg.evaluate.drafter)
    check_belongs(read_shape(path, info.num_layers), info, str(path))
    names = sorted([path / "config.json", *path.glob("*.safetensors")])
    return path, files.digest([[f.name, files.file_digest(f)] for f in names]), None


def report_of(cfg: RunConfig, digest: str) -> dict[str, Any] | None:
    """The finished report of this drafter, if there is one."""
    manifest = manifests.read(folder(cfg)) if folder(cfg).exists() else None
    if not manifest or not manifest["complete"] or manifest["inputs"]["drafter"] != digest:
        return None
    return json.loads((folder(cfg) / "report.json").read_text())


def traces_json(prompts: list[Sample], traces: dict[str, list[Trace]]) -> list[dict[str, Any]]:
    """What happened at every prompt, for other tools and for serve-check."""
    return [
        {
            "sample_id": sample.sample_id,
            "prompt_ids": prompt_of(sample),
            "methods": {name: asdict(mine[i]) for name, mine in traces.items()},
        }
        for i, sample in enumerate(prompts)
    ]


def last_checkpoint(cfg: RunConfig) -> Path:
    """The newest checkpoint of the run."""
    found = train.checkpoints(train.folder(cfg))
    if not found:
        raise UserError(
            where=str(train.folder(cfg)),
            found="no checkpoint",
            expected="a trained drafter",
            remedy="Run `draftsmith train CONFIG` first.",
        )
    return found[-1]


def held_out_prompts(cfg: RunConfig, tokens: dict[str, Any]) -> list[Sample]:
    """At most `evaluate.max_prompts` held-out samples, chosen by a hash of the prompt's tokens."""
    samples = tokenize_stage.read_samples(cfg, tokens, "held_out")
    need = 2 if "shuffled" in cfg.evaluate.methods else 1
    chosen = sorted(samples, key=lambda s: files.digest([cfg.seed, prompt_of(s)]))
    if len(chosen[: cfg.evaluate.max_prompts]) < need:
        raise UserError(
            where="evaluate.suites",
            found=f"{len(samples)} held-out prompts with an answer, {cfg.evaluate.max_prompts} asked for",
            expected=f"at least {need}"
            + (": shuffled needs another sample's features" if need > 1 else ""),
            remedy="Raise prepare.held_out or evaluate.max_prompts.",
        )
    return chosen[: cfg.evaluate.max_prompts]


def prompt_of(sample: Sample) -> list[int]:
    """The tokens before the supervised answer."""
    return sample.input_ids[: sample.loss_mask.index(1)]


def measure(
    cfg: RunConfig,
    target: PreTrainedModel,
    checkpoint: Path,
    prompts: list[Sample],
    eos: list[int],
    stage: StageReport | None = None,
) -> dict[str, list[Trace]]:
    """Every method's trace of every prompt. Methods take turns prompt by prompt, so that machine
    noise hits all alike.
    """
    drafters = _drafters(cfg, target, checkpoint)
    shape = drafters["chain"].shape
    block_size, taps = shape.block_size, list(shape.taps)
    traces: dict[str, list[Trace]] = {method: [] for method in cfg.evaluate.methods}

    def decode(method: str, sample: Sample, proposer: Proposer) -> Trace:
        end = AnswerEnd(
            eos_ids=eos,
            max_new_tokens=cfg.evaluate.max_new_tokens,
            loop_ngram=cfg.evaluate.loop_ngram,
        )
        session = TargetSession(target, taps if method in DRAFTED else [])
        return speculate(session, prompt_of(sample), proposer, end)

    decode("ar", prompts[0], NoProposer())  # warm up
    done = 0
    for i, sample in enumerate(prompts):
        traces["ar"].append(decode("ar", sample, NoProposer()))
        other = prompts[(i + 1) % len(prompts)]
        for method in cfg.evaluate.methods:
            if method == "lookup":
                traces[method].append(decode(method, sample, LookupProposer(block_size - 1)))
            elif method == "shuffled":
                features = features_of(target, taps, other)
                traces[method].append(
                    decode(method, sample, DraftProposer(drafters["chain"], features))
                )
            elif method in DRAFTED:
                traces[method].append(decode(method, sample, DraftProposer(drafters[method])))
        done += len(traces)
        if stage:
            shown = {f"tau_{m}": _running_tau(traces[m]) for m in cfg.evaluate.methods if m != "ar"}
            stage.progress(done, **shown)
    if not any(trace.emitted for trace in traces["ar"]):
        raise UserError(
            where="evaluate",
            found="no answer of more than one token",
            expected="something to draft",
            remedy="Look at the answers (RUN/data/answers), or use other prompts.",
        )
    return traces


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
        .init_weights(cfg.seed)
        .to(**options)
        .eval()
        .requires_grad_(False)
        .share(*shared)
    )
    return {"chain": trained, "untrained": twin}


def _report(
    cfg: RunConfig,
    target: dict[str, Any],
    prompts: list[Sample],
    traces: dict[str, list[Trace]],
    tokenizer: Any,
    shape: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    methods = {
        name: summarize(mine, traces["ar"], shape["block_size"], str(dtype).removeprefix("torch."))
        for name, mine in traces.items()
    }
    examples = [
        {
            "prompt": tokenizer.decode(prompt_of(prompts[i])),
            "answer": tokenizer.decode(traces["ar"][i].tokens),
        }
        for i in range(min(EXAMPLES, len(prompts)))
    ]
    return {
        "format": "report/1",
        "run": cfg.run,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": target,
        "drafter": {
            k: shape[k]
            for k in ("num_layers", "hidden_size", "block_size", "taps", "layer_types", "steps")
        },
        "settings": {
            **cfg.evaluate.model_dump(exclude={"tree_budget"}),
            "compute_dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "device": str(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"),
        },
        "suites": [
            {
                "name": "held_out",
                "num_prompts": len(prompts),
                "methods": methods,
                "examples": examples,
            }
        ],
    }


def _refuse_mismatches(result: dict[str, Any], out: Path) -> None:
    """In fp32 a text may differ only at a near tie. In bf16 a block and a token round differently:
    reported, not refused.
    """
    methods = result["suites"][0]["methods"]
    wrong = {name: m["mismatches"] for name, m in methods.items() if m["mismatches"]}
    if wrong and result["settings"]["compute_dtype"] == "float32":
        raise FaultFound(
            f"text that differs from the autoregressive text beyond near ties: {wrong}; see "
            f"`differences` in {out / 'report.json'}"
        )
