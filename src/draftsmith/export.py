"""The export stage: RUN/export in z-lab's layout, which vLLM and SGLang load unchanged; read back
and checked.
"""

import json
import shutil
from pathlib import Path

import torch

from draftsmith import evaluate, files, train
from draftsmith import manifest as manifests
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
    trained = manifests.required(train.folder(cfg), "train")
    with stage_report(cfg.root, "export") as report:
        marker = cfg.root / "export.json"
        inputs = {"drafter": trained["digest"], "layout": cfg.export.layout}
        if out.exists() and marker.exists() and json.loads(marker.read_text()) == inputs:
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
        files.write_json(marker, inputs)
        report.progress(1)
        size = (out / "model.safetensors").stat().st_size
    return StageResult(
        "export", str(out), summary={"bytes": size, "tensors": len(drafter.state_dict())}
    )
