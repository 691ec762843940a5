"""`draftsmith export-features STORE OUT`: a store as the data folder that `speculators train` reads:
a saved data set (input_ids, loss_mask, seq_len) and hidden_states/hs_I.safetensors for row I.

speculators takes the last layer of a file as the target's final state, so the store needs
`features.final: state`.
"""

from pathlib import Path

import torch

from draftsmith.core import UserError
from draftsmith.files import new_folder
from draftsmith.store.foreign import write_sample
from draftsmith.store.reader import StoreReader

FOLDER = "hidden_states"


def run(store: str, out: Path, *, fp8: bool) -> None:
    """Write OUT; a folder that is there is left alone."""
    reader = StoreReader(store)
    inputs = reader.manifest["inputs"]
    if inputs["final"] != "state":
        raise UserError(
            where=store,
            found=f"features.final: {inputs['final']}",
            expected="state: speculators' files end with the last layer's output",
            remedy="Extract into another store with --features.final state.",
        )
    if out.exists():
        raise UserError(
            where=str(out), found="a folder or file", expected="a new path", remedy="Move it away."
        )
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        for row, sample_id in enumerate(reader.sample_ids):
            read = reader.read(sample_id, ("hidden", "final", "input_ids", "loss_mask"))
            states = torch.cat([read["hidden"], read["final"][:, None]], dim=1)
            write_sample(
                folder / FOLDER / f"hs_{row}.safetensors", read["input_ids"], states, fp8=fp8
            )
            ids, mask = read["input_ids"].tolist(), read["loss_mask"].tolist()
            rows.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
        _save_data_set(folder, rows)
    layers = " ".join(str(tap + 1) for tap in inputs["taps"])
    backend = " --hidden-states-backend fp8" if fp8 else ""
    print(f"{len(rows)} samples in {out}; speculators train --data-path {out} "
          f"--target-layer-ids {layers} --on-missing raise{backend}")  # fmt: skip


def _save_data_set(folder: Path, rows: list[dict]) -> None:
    try:
        from datasets import Dataset
    except ImportError:
        raise UserError(
            where="export-features",
            found="no package datasets",
            expected="it, to write speculators' data set",
            remedy="pip install 'draftsmith[hub]'.",
        ) from None
    data = Dataset.from_list(rows)
    data.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    data.save_to_disk(folder)
