"""`draftsmith verify STORE --engine vllm`: states that a vLLM server extracts for some of the store's
samples against the stored ones, a tap at a time. It tells whether a drafter may be trained on one
and served on the other.
"""

import fcntl
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from draftsmith import files
from draftsmith.core import FaultFound, UserError
from draftsmith.serving.client import VLLM, connect
from draftsmith.serving.launch import running
from draftsmith.store.reader import StoreReader

COSINE_ABOVE, ERROR_BELOW = 0.99, 0.05
"""Two bf16 engines agree to about 1% a token; a wrong layer or a lost state is far outside."""


def run(
    store: str, *, command: str, num_samples: int, wait_s: float, log: Path, as_json: bool
) -> None:
    """Print the table; FaultFound when a tap disagrees."""
    reader = StoreReader(store)
    inputs = reader.manifest["inputs"]
    taps, layers = inputs["taps"], inputs["target"]["num_layers"]
    aux = sorted({a for tap in taps for a in (tap, tap + 1, tap + 2) if 1 <= a < layers})
    chosen = sorted(reader.sample_ids, key=lambda i: files.digest([inputs["seed"], i]))
    pairs: list[tuple[Tensor, Tensor]] = []
    with (
        tempfile.TemporaryDirectory(prefix="draftsmith-states-") as folder,
        running(command, options(aux, folder), log, wait_s=wait_s) as url,
    ):
        client = connect(url)
        if not isinstance(client, VLLM):
            raise UserError(
                where="--command",
                found=client.name,
                expected="vLLM: it alone hands out hidden states",
                remedy="Give the command that starts a vLLM server.",
            )
        for sample_id in chosen[:num_samples]:
            sample = reader.read(sample_id)
            theirs = extracted(client, sample["input_ids"].tolist())
            pairs.append((sample["hidden"].float(), theirs.float()))
    result = {"engine": client.name, "samples": len(pairs), "taps": compare(pairs, taps, aux)}
    print(json.dumps(result, indent=1) if as_json else table(result))
    wrong = [tap for tap in result["taps"] if not tap["agrees"]]
    if wrong:
        raise FaultFound("; ".join(f"tap {tap['tap']}: {tap['finding']}" for tap in wrong))


def options(aux: list[int], folder: str) -> list[str]:
    """vLLM's flags for handing out the states at these aux ids (aux a = output of layer a - 1)."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": aux}}
    spec = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": layers,
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return [
        "--speculative-config", json.dumps(spec), "--kv-transfer-config", json.dumps(transfer),
        "--no-enable-prefix-caching",
    ]  # fmt: skip


def extracted(client: VLLM, ids: list[int]) -> Tensor:
    """[n, aux ids, H] of one prompt, as the server writes them."""
    answer = client.post(ids, 1, [])
    path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    if path is None:
        raise UserError(
            where="--command",
            found="an answer without hidden_states_path",
            expected="vLLM 0.22 or newer with its ExampleHiddenStatesConnector",
            remedy="Look into the server's log.",
        )
    with open(f"{path}.lock") as lock:  # the writer holds it until the file is whole
        fcntl.flock(lock, fcntl.LOCK_SH)
    if not Path(path).exists():
        raise UserError(
            where="--command",
            found=f"no states at {path}, though their writer was done",
            expected="a server that writes them",
            remedy="Look into the server's log.",
        )
    out = load_file(path)
    assert out["token_ids"].tolist() == ids, "the server's states are this prompt's"
    return out["hidden_states"]


def compare(
    pairs: list[tuple[Tensor, Tensor]], taps: list[int], aux: list[int]
) -> list[dict[str, Any]]:
    """A finding for each tap. `pairs` are ours [n, taps, H] and theirs [n or fewer, aux, H]."""
    out = []
    for column, tap in enumerate(taps):
        ours = torch.cat([mine[: len(its), column] for mine, its in pairs])
        errors = {
            a: _errors(torch.cat([its[: len(mine), aux.index(a)] for mine, its in pairs]), ours)
            for a in (tap, tap + 1, tap + 2)
            if a in aux
        }
        theirs = torch.cat([its[: len(mine), aux.index(tap + 1)] for mine, its in pairs])
        error = errors[tap + 1]
        cosine = torch.cosine_similarity(theirs, ours, dim=-1)
        missing = sum(max(0, len(mine) - len(its)) for mine, its in pairs)
        zero = int((theirs.abs().amax(-1) == 0).sum())
        best = min(errors, key=lambda a: float(errors[a].median()))
        numbers = {
            "tap": tap,
            "tokens": len(ours),
            "cosine_median": float(cosine.median()),
            "cosine_min": float(cosine.min()),
            "error_median": float(error.median()),
            "error_max": float(error.max()),
            "zero_rows": zero,
            "missing_rows": missing,
            "bad_rows": int((error > 0.2).sum()),
        }
        finding = _finding(numbers, tap, best, float(errors[best].median()))
        out.append({**numbers, "finding": finding, "agrees": finding == "agrees"})
    return out


def _errors(theirs: Tensor, ours: Tensor) -> Tensor:
    """|theirs - ours| / |ours|, a row."""
    return (theirs - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-9)


def _finding(numbers: dict[str, Any], tap: int, best: int, best_error: float) -> str:
    if numbers["missing_rows"]:
        return f"{numbers['missing_rows']} tokens without states"
    if numbers["zero_rows"]:
        return f"{numbers['zero_rows']} of {numbers['tokens']} rows are zero"
    if best != tap + 1 and best_error < ERROR_BELOW:
        return f"the server's aux id {tap + 1} holds layer {best - 1}: ids are shifted"
    if numbers["error_median"] < ERROR_BELOW and numbers["cosine_median"] > COSINE_ABOVE:
        share = numbers["bad_rows"] / numbers["tokens"]
        return "agrees" if share < 0.01 else f"{share:.0%} of the rows differ by more than a fifth"
    return f"differs: relative error {numbers['error_median']:.3f} in the median row"


def table(result: dict[str, Any]) -> str:
    """The comparison for a terminal."""
    grid = Table(title=f"{result['engine']} against the store, {result['samples']} samples")
    columns = (
        "tap",
        "cosine median",
        "min",
        "relative error median",
        "max",
        "zero rows",
        "finding",
    )
    for column in columns:
        grid.add_column(column)
    for tap in result["taps"]:
        grid.add_row(
            str(tap["tap"]), f"{tap['cosine_median']:.5f}", f"{tap['cosine_min']:.4f}",
            f"{tap['error_median']:.4f}", f"{tap['error_max']:.3f}", str(tap["zero_rows"]),
            tap["finding"],
        )  # fmt: skip
    console = Console(width=130, file=io.StringIO())
    console.print(grid)
    return console.file.getvalue()  # type: ignore[attr-defined]
