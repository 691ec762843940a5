"""The evaluate stage: what the drafter is worth on held-out prompts and benchmarks, in the real loop,
beside baselines and controls.

ar: one token a call. lookup: prompt lookup. mtp: the target's own head. chain: the trained drafter. tree:
the same drafter's most probable prefixes (evaluate.tree_budget nodes). Controls: untrained (the
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

import draftsmith.tokenize as tokenize_stage
from draftsmith import files, report, train
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, Sample, StageResult, UserError
from draftsmith.decode.methods import Answered, Prompt, measure, prompt_of
from draftsmith.drafter.checkpoint import find_drafter, read_shape
from draftsmith.drafter.config import check_belongs, check_tokenizer
from draftsmith.evaluate import suites
from draftsmith.metrics import summarize
from draftsmith.monitor.state import stage_report
from draftsmith.report import page
from draftsmith.target.load import (
    TargetInfo,
    device_of,
    eos_ids,
    inspect_target,
    load_target,
    load_tokenizer,
)
from draftsmith.train import checkpoints

HELD_OUT = "held_out"
EXAMPLES = 3  # texts shown in the report
TRACES = "traces.json"
KEPT = "kept.jsonl"  # a prompt's traces a line, while the stage runs


def folder(cfg: RunConfig) -> Path:
    """Where the report goes."""
    return cfg.root / "eval"


def run(cfg: RunConfig) -> StageResult:
    """Measure every method on every suite; write report.json, report.html and report.md. FaultFound
    when greedy text differs.
    """
    out = folder(cfg)
    held_out = HELD_OUT in cfg.evaluate.suites
    tokens = tokenize_stage.finished(cfg) if held_out else None
    dtype_name = cfg.target.dtype if cfg.evaluate.dtype == "target" else cfg.evaluate.dtype
    sizes = f"evaluate.tree_budget {cfg.evaluate.tree_budget}, max_new_tokens {cfg.evaluate.max_new_tokens}"
    with stage_report(cfg.root, "evaluate", sizes) as stage:
        info, tokenizer = inspect_target(cfg.target), load_tokenizer(cfg.target)
        drafter, digest, steps = _drafter(cfg, info, tokenizer)
        inputs = {
            "target": info.identity(),
            "drafter": digest,
            "tokens": tokens["digest"] if tokens else None,
            "prompts": [suites.digests(cfg), suites.template_kwargs(cfg)],
            "seed": cfg.seed,
            "compute_dtype": dtype_name,
            "device": device_of(cfg.target).type,
            **cfg.evaluate.model_dump(exclude={"drafter", "data"}),
        }
        manifest = manifests.begin(out, "eval/2", inputs, remake=True)
        if manifest["complete"]:
            _refuse_mismatches(json.loads((out / "report.json").read_text()), out)
            return StageResult("evaluate", str(out), skipped=True, summary=manifest["counts"])
        prompts = [
            prompt
            for suite in cfg.evaluate.suites
            for prompt in (
                _as_prompts(held_out_prompts(cfg, tokens or {}), info)
                if suite == HELD_OUT
                else suites.load(cfg, suite, tokenizer, info)
            )
        ]
        dtype = getattr(torch, dtype_name)
        target = load_target(cfg.target, dtype=dtype)
        eos = eos_ids(tokenizer, cfg.target)
        turns = sum(1 + len(prompt.later) for prompt in prompts)
        stage.working(turns * len(cfg.evaluate.methods), "answers")
        answered = measure(
            cfg, target, drafter, prompts, eos, stage.progress, out / KEPT,
            follow=suites.follower(cfg, tokenizer, info),
        )  # fmt: skip
        described = {**asdict(read_shape(drafter, info.num_layers)), "steps": steps}
        result = _report(cfg, info.identity(), answered, tokenizer, described, dtype)
        manifest = _write(cfg, out, manifest, result, answered)
        print(report.table(result))
        print(f"report: {out / 'report.html'}")
        _refuse_mismatches(result, out)
    return StageResult("evaluate", str(out), summary=manifest["counts"])


def _write(
    cfg: RunConfig, out: Path, manifest: Any, result: dict[str, Any], answered: list[Answered]
) -> Any:
    """Every file, then the manifest."""
    files.write_json(out / "report.json", result)
    files.write_json(out / TRACES, traces_json(answered))
    losses = report.read_losses(cfg.root)
    for name, text in (
        ("report.html", page.render_html(result, losses)),
        ("report.md", report.markdown(result)),
    ):
        files.write_atomic(out / name, lambda path, text=text: path.write_text(text))
    entries = {
        name: {"sha256": files.file_digest(out / name), "bytes": (out / name).stat().st_size}
        for name in ("report.json", "report.html", "report.md", TRACES)
    }
    methods = result["suites"][0]["methods"]
    counts = {f"tau_{name}": m["tau_pooled"] for name, m in methods.items()}
    manifest = manifests.finish(out, manifest, entries, counts)
    (out / KEPT).unlink()
    return manifest


def _as_prompts(samples: list[Sample], info: TargetInfo) -> list[Prompt]:
    out = []
    for s in samples:
        ids = prompt_of(s)
        suites.check_prompt(ids, info, f"held-out sample {s.sample_id}")
        out.append(Prompt(HELD_OUT, s.sample_id, ids, s.input_ids, Path(s.source).stem))
    return out


def _drafter(cfg: RunConfig, info: TargetInfo, tokenizer: Any) -> tuple[Path, str, int | None]:
    """The checkpoint to measure, its digest, and its training steps where they are known."""
    if cfg.evaluate.drafter is None:
        trained = train.finished(cfg)
        return last_checkpoint(cfg), trained["digest"], trained["counts"]["steps"]
    path = find_drafter(cfg.evaluate.drafter)
    shape = read_shape(path, info.num_layers)
    check_belongs(shape, info, str(path))
    check_tokenizer(path, shape, tokenizer)
    names = sorted([path / "config.json", *path.glob("*.safetensors")])
    return path, files.digest([[f.name, files.file_digest(f)] for f in names]), None


def report_of(cfg: RunConfig, digest: str) -> dict[str, Any] | None:
    """The finished report of this drafter, if there is one."""
    manifest = manifests.read(folder(cfg)) if folder(cfg).exists() else None
    if not manifest or not manifest["complete"] or manifest["inputs"]["drafter"] != digest:
        return None
    return json.loads((folder(cfg) / "report.json").read_text())


def traces_json(answered: list[Answered]) -> list[dict[str, Any]]:
    """What happened at every prompt, for other tools and for serve-check."""
    return [
        {
            "suite": prompt.suite,
            "sample_id": prompt.sample_id,
            "turn": prompt.turn,
            "domain": prompt.domain,
            "prompt_ids": prompt.ids,
            "methods": {name: asdict(trace) for name, trace in traces.items()},
        }
        for prompt, traces in answered
    ]


def last_checkpoint(cfg: RunConfig) -> Path:
    """The newest checkpoint of the run."""
    found = checkpoints.checkpoints(train.folder(cfg))
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


def _report(
    cfg: RunConfig,
    target: dict[str, Any],
    answered: list[Answered],
    tokenizer: Any,
    shape: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    compute = str(dtype).removeprefix("torch.")
    return {
        "format": "report/2",
        "run": cfg.run,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": target,
        "drafter": {
            k: shape[k]
            for k in ("num_layers", "hidden_size", "block_size", "taps", "layer_types", "steps")
        },
        "settings": {
            **cfg.evaluate.model_dump(exclude={"drafter"}),
            "template_kwargs": suites.template_kwargs(cfg),
            "compute_dtype": compute,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "device": str(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"),
        },
        "suites": [
            _suite(
                cfg, name, [a for a in answered if a[0].suite == name], tokenizer, shape, compute
            )
            for name in cfg.evaluate.suites
        ],
    }


def _suite(
    cfg: RunConfig,
    name: str,
    answered: list[Answered],
    tokenizer: Any,
    shape: dict[str, Any],
    compute: str,
) -> dict[str, Any]:
    domains = [prompt.domain for prompt, _ in answered]
    reference = [traces["ar"] for _, traces in answered]
    methods = {
        method: summarize(
            [traces[method] for _, traces in answered], reference, shape["block_size"],
            dtype=compute, sampled=cfg.evaluate.temperature > 0, domains=domains,
        )
        for method in cfg.evaluate.methods
    }  # fmt: skip
    examples = [
        {"prompt": tokenizer.decode(p.ids), "answer": tokenizer.decode(traces["ar"].tokens)}
        for p, traces in answered[:EXAMPLES]
    ]
    return {
        "name": name,
        "num_prompts": len(answered),
        "prompt_tokens": sum(len(prompt.ids) for prompt, _ in answered),
        "methods": methods,
        "examples": examples,
    }


def _refuse_mismatches(result: dict[str, Any], out: Path) -> None:
    """In fp32 a text may differ only at a near tie. In bf16 a block and a token round differently:
    reported, not refused.
    """
    wrong = {
        f"{suite['name']} {name}": m["mismatches"]
        for suite in result["suites"]
        for name, m in suite["methods"].items()
        if m["mismatches"]
    }
    if wrong and result["settings"]["compute_dtype"] == "float32":
        raise FaultFound(
            f"text that differs from the autoregressive text beyond near ties: {wrong}; see "
            f"`differences` in {out / 'report.json'}"
        )
