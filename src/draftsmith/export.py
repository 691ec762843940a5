"""The export stage: RUN/export in z-lab's layout, which vLLM and SGLang load unchanged; read back
and checked.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from draftsmith import evaluate, files, train
from draftsmith.config import RunConfig
from draftsmith.core import StageResult
from draftsmith.drafter.checkpoint import load_drafter, save_drafter
from draftsmith.monitor.state import stage_report


def folder(cfg: RunConfig) -> Path:
    """Where the export goes."""
    return cfg.root / "export"


def run(cfg: RunConfig) -> StageResult:
    """Write config.json and bf16 model.safetensors; load them again and compare every tensor."""
    out = folder(cfg)
    trained = train.finished(cfg)
    with stage_report(cfg.root, "export") as report:
        marker = cfg.root / "export.json"
        inputs = {"drafter": trained["digest"], "layout": cfg.export.layout}
        if _complete(out, marker, inputs):
            return StageResult("export", str(out), skipped=True, summary={"path": str(out)})
        report.working(1, "exports")
        drafter = load_drafter(evaluate.last_checkpoint(cfg))
        marker.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        with files.new_folder(out) as temporary:
            save_drafter(temporary, drafter, torch.bfloat16)
            again = load_drafter(temporary)
            for name, tensor in drafter.state_dict().items():
                assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), (
                    f"{name} changed on its way to disk"
                )
        sizes = {path.name: path.stat().st_size for path in out.iterdir()}
        files.write_json(marker, {"inputs": inputs, "sizes": sizes})
        report.progress(1)
        size = sizes["model.safetensors"]
    return StageResult(
        "export", str(out), summary={"bytes": size, "tensors": len(drafter.state_dict())}
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
