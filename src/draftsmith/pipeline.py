"""All stages in order, each skipped when its output is complete and its inputs are unchanged."""

import json
import time
from collections.abc import Callable

import yaml

import draftsmith.tokenize as tokenize_stage
from draftsmith import evaluate, export, extract, mirror, prepare, regenerate, train
from draftsmith.config import RunConfig
from draftsmith.core import StageResult, UserError
from draftsmith.files import write_atomic
from draftsmith.monitor.state import more_stages

STAGES: dict[str, Callable[[RunConfig], StageResult]] = {
    "prepare": prepare.run,
    "regenerate": regenerate.run,
    "tokenize": tokenize_stage.run,
    "extract": extract.run,
    "train": train.run,
    "evaluate": evaluate.run,
    "export": export.run,
}


def run(cfg: RunConfig, stages: list[str] | None = None) -> list[StageResult]:
    """Run these stages (default: all). The resolved configuration is saved as RUN/run.yaml."""
    names = stages or [name for name in STAGES if name != "regenerate" or cfg.regenerate.enabled]
    if stages is None and not cfg.prepare.held_out:
        raise UserError(
            where="prepare.held_out",
            found="0",
            expected="prompts to evaluate on",
            remedy="Raise it, or run the stages before evaluate one by one.",
        )
    if "train" in names:
        train.drafter_shape(cfg)  # what cannot be trained is refused before hours of extraction
    with mirror.following(cfg):
        return _stages(cfg, names, whole=stages is None)


def _stages(cfg: RunConfig, names: list[str], *, whole: bool) -> list[StageResult]:
    results: list[StageResult] = []
    before = _finished_state(cfg)
    for name in names:
        if whole and name == "extract" and _features_are_spent(cfg):
            print(f"{name:<11}{'not needed':>17}  training is complete", flush=True)
            continue
        started = time.perf_counter()
        more = more_stages.set(name != names[-1])
        try:
            result = STAGES[name](cfg)
        except UserError:
            if before and all(r.skipped for r in results) and _nothing_begun(cfg):
                write_atomic(cfg.root / "state.json", lambda path: path.write_text(before))
            raise
        finally:
            more_stages.reset(more)
        if not result.skipped or name == names[-1]:
            _save_config(cfg)  # what a later stage may refuse is not written down by a skipped one
        took = "already complete" if result.skipped else f"{time.perf_counter() - started:.1f} s"
        print(f"{name:<11}{took:>17}  {_summary(result)}", flush=True)
        results.append(result)
    return results


def _features_are_spent(cfg: RunConfig) -> bool:
    """Whether the features are gone, or were never here, and training does not need them any more."""
    return not extract.is_finished(cfg) and train.is_finished(cfg)


def _finished_state(cfg: RunConfig) -> str | None:
    """state.json of a run that is DONE: a refused command must not turn it into a failure."""
    path = cfg.root / "state.json"
    text = path.read_text() if path.is_file() else ""
    return text if '"state": "DONE"' in text else None


def _nothing_begun(cfg: RunConfig) -> bool:
    """Whether the stage that was refused had not begun to work."""
    return json.loads((cfg.root / "state.json").read_text())["total"] is None


def _save_config(cfg: RunConfig) -> None:
    """RUN/run.yaml, once a stage has accepted the configuration."""
    text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    write_atomic(cfg.root / "run.yaml", lambda path: path.write_text(text))


def _summary(result: StageResult) -> str:
    shown = {
        k: round(v, 4) if isinstance(v, float) else v
        for k, v in result.summary.items()
        if v or v == 0
    }
    return " ".join(
        f"{key}={json.dumps(value)}" for key, value in shown.items() if not isinstance(value, list)
    )
