"""The export stage: RUN/export in z-lab's layout with a model card, which vLLM and SGLang load
unchanged; read back and checked.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

import draftsmith.tokenize as tokenize_stage
from draftsmith import card, evaluate, files, train
from draftsmith.config import RunConfig
from draftsmith.core import StageResult
from draftsmith.drafter.checkpoint import load_drafter, save_drafter
from draftsmith.drafter.config import check_belongs
from draftsmith.drafter.model import DFlash
from draftsmith.monitor.state import stage_report
from draftsmith.target.load import inspect_target


def folder(cfg: RunConfig) -> Path:
    """Where the export goes."""
    return cfg.root / "export"


def run(cfg: RunConfig) -> StageResult:
    """Write config.json, bf16 model.safetensors and README.md; load them again and compare every
    tensor.
    """
    out = folder(cfg)
    trained = train.finished(cfg)
    with stage_report(cfg.root, "export") as state:
        info = inspect_target(cfg.target)
        measured = evaluate.report_of(cfg, trained["digest"])
        marker = cfg.root / "export.json"
        inputs = {
            "drafter": trained["digest"],
            "layout": cfg.export.layout,
            "report": files.digest(measured),
        }
        if _complete(out, marker, inputs):
            return StageResult("export", str(out), skipped=True, summary={"path": str(out)})
        state.working(1, "exports")
        drafter = load_drafter(evaluate.last_checkpoint(cfg))
        check_belongs(drafter.shape, info, str(out))
        counts = tokenize_stage.finished(cfg)["counts"]
        marker.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        with files.new_folder(out) as temporary:
            save_drafter(temporary, drafter, torch.bfloat16)
            _check_again(temporary, drafter)
            text = card.render(cfg, info, drafter.shape, counts, trained["counts"], measured)
            (temporary / "README.md").write_text(text)
        sizes = {path.name: path.stat().st_size for path in out.iterdir()}
        files.write_json(marker, {"inputs": inputs, "sizes": sizes})
        state.progress(1)
        size = sizes["model.safetensors"]
    return StageResult(
        "export", str(out), summary={"bytes": size, "tensors": len(drafter.state_dict())}
    )


def _check_again(folder: Path, drafter: DFlash) -> None:
    """What was written reads back, through the checks that a published checkpoint must pass."""
    again = load_drafter(folder)
    assert again.shape == drafter.shape, "the exported config says what was trained"
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), (
            f"{name} changed on its way to disk"
        )


def _complete(out: Path, marker: Path, inputs: dict[str, Any]) -> bool:
    """Whether the export was made from these inputs and is all there."""
    try:
        made = json.loads(marker.read_text())
        return made["inputs"] == inputs and all(
            (out / name).stat().st_size == size for name, size in made["sizes"].items()
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False
