"""The files of this folder, made by the packages themselves on a CPU: vLLM 0.24.0's
ExampleHiddenStatesConnector and hs-connectors 0.9.0's FP8 connector write, speculators 0.9.0 reads.

    python make.py write TARGET OUT      vllm/*.safetensors (+ .lock) and fp8/*.safetensors
    python make.py read DATA             `export-features`' folder through speculators' ArrowDataset

Needs vllm (no GPU: only its writer runs), hs-connectors, speculators. The states are plain
Transformers' in fp32, kept as bf16; the last layer's by a hook, before the final norm.
"""

import sys
from pathlib import Path

import torch

LAYER_IDS = [2, 4, 6, 8]  # of the built-in tiny hybrid: taps 1, 3, 5 and the final state
TEXTS = [[5, 900, 17, 2042, 33, 801, 77], list(range(40, 61)), [11, 12, 13, 1500, 14, 15] * 3]


class Copied:
    """Stands for the CUDA event of a copy that is done."""

    def synchronize(self) -> None:
        pass


def write(target: Path, out: Path) -> None:
    import fcntl
    import os

    from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    for name, connector in (
        ("vllm", ExampleHiddenStatesConnector),
        ("fp8", FP8HiddenStatesConnector),
    ):
        (out / name).mkdir(parents=True, exist_ok=True)
        for i, (ids, states) in enumerate(zip(TEXTS, extracted(target), strict=True)):
            path = out / name / f"cmpl-{i}-0.safetensors"
            lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
            connector._write_tensors(tensors, Copied(), str(path), lock)


@torch.inference_mode()
def extracted(target: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    layers, seen = model.model.layers, []
    layers[-1].register_forward_hook(
        lambda module, args, output: seen.append(output if torch.is_tensor(output) else output[0])
    )
    out = []
    for ids in TEXTS:
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = [hidden[k] for k in LAYER_IDS[:-1]] + [seen[-1]]
        out.append(torch.stack([s[0] for s in states], 1).bfloat16().contiguous())
    return out


def read(data: Path) -> None:
    """Every row as speculators' trainer gets it."""
    from hs_connectors import FileTransfer, FP8Transfer
    from safetensors.torch import load_file
    from speculators.train.data import ArrowDataset

    first = load_file(data / "hidden_states" / "hs_0.safetensors")
    kind = FP8Transfer if "hidden_states_scales" in first else FileTransfer
    rows = ArrowDataset(4096, data, transfer=kind(data / "hidden_states"), on_missing="raise")
    tokens = 0
    for i in range(len(rows)):
        row = rows[i]
        n, layers, hidden = load_file(data / "hidden_states" / f"hs_{i}.safetensors")[
            "hidden_states"
        ].shape
        assert row["hidden_states"].shape == (n, (layers - 1) * hidden), "taps, flat"
        assert row["verifier_last_hidden_states"].shape == (n, hidden), "the final state"
        assert len(row["loss_mask"]) == n and torch.isfinite(row["hidden_states"]).all()
        tokens += n
    print(f"{len(rows)} rows, {tokens} tokens read by {kind.__name__}")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*map(Path, sys.argv[2:]))
