"""`draftsmith verify STORE [--recompute N]`: whether a feature store is what it says it is.

Reads every byte once: checksums, impossible rows, and token ids against the run's data where it is
beside the store. With `--recompute`, N samples also go through an independent forward.
"""

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith import manifest as manifests
from draftsmith import places, tables
from draftsmith.core import Damaged, FaultFound
from draftsmith.places import Folder, Place
from draftsmith.recompute import recompute
from draftsmith.store.checks import Finding, StoreChecks, Tokens
from draftsmith.store.reader import StoreReader, complete_manifest

MOST = 1000
"""Findings after which the store is given up; all of a broken store's samples would be named."""
SHOWN = 20


def run(
    location: str,
    *,
    recomputed: int = 0,
    data: Path | None = None,
    target: str | None = None,
    as_json: bool = False,
) -> None:
    """Print what was checked and found; FaultFound when anything was."""
    place = places.at(location)
    try:
        manifest = complete_manifest(place)
    except Damaged as error:
        _report({"store": location, "findings": [Finding(str(error)).plain()]}, as_json)
        raise FaultFound(str(error)) from None
    tokens = _tokens(place, data, manifest)
    checks = StoreChecks(place, manifest, tokens)
    findings = list(islice(checks.run(), MOST))
    result: dict[str, Any] = {
        "store": location,
        **{key: manifest["counts"][key] for key in ("shards", "samples", "tokens")},
        "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        "checked_samples": len(checks.seen),
        "checked_tokens_against_data": tokens is not None,
        "recomputed": 0,
        "taps": [],
    }
    whole = {f.shard for f in findings if f.sample is None} == set()
    if recomputed and whole:  # a shard that does not open has no states to compare
        reader = StoreReader(place)
        result["recomputed"] = min(recomputed, len(reader.sample_ids))
        result["taps"], more = recompute(reader, recomputed, target)
        findings += more
    _report({**result, "findings": [f.plain() for f in findings]}, as_json)
    if findings:
        raise FaultFound(f"{len(findings)} faults in {location}: {findings[0]}")


def _tokens(place: Place, data: Path | None, manifest: dict[str, Any]) -> Tokens | None:
    """The run's tokens: those of `data`, or of the run whose folder holds the store, if it does."""
    folder = data / "data" / "tokens" if data is not None else None
    if folder is None and isinstance(place, Folder):
        folder = place.path.absolute().parent / "data" / "tokens"
    if folder is None or (data is None and not folder.exists()):
        return None
    described = manifests.required(folder, "tokenize", (manifests.read(folder) or {})["inputs"])
    return {
        row["sample_id"]: (list(row["input_ids"]), list(row["loss_mask"]))
        for row in tables.read_rows(folder, described)
    }


def _report(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=1))
        return
    if "bytes" in result:
        tokens = "and the run's tokens" if result["checked_tokens_against_data"] else ""
        print(
            f"{result['store']}: {result['checked_samples']} of {result['samples']} samples, "
            f"{result['bytes'] / 1e9:.3f} GB: checksums, rows {tokens}"
        )
    if result.get("taps"):
        print(_table(result), end="")
    findings = [str(Finding(**finding)) for finding in result["findings"]]
    print("\n".join(findings[:SHOWN]) or "no faults")
    if len(findings) > SHOWN:
        print(f"... and {len(findings) - SHOWN} more; --json lists {MOST}")


def _table(result: dict[str, Any]) -> str:
    grid = Table(title=f"{result['recomputed']} samples alone through the uncut target in fp32")
    columns = ("tap", "tokens", "cosine median", "min", "error median", "max", "noise floor", "max")
    for column in (*columns, "wrong samples"):
        grid.add_column(column)
    for tap in result["taps"]:
        grid.add_row(
            str(tap["tap"]), str(tap["tokens"]), f"{tap['cosine_median']:.6f}",
            f"{tap['cosine_min']:.5f}", f"{tap['error_median']:.2e}", f"{tap['error_max']:.2e}",
            f"{tap['floor_median']:.2e}", f"{tap['floor_max']:.2e}", str(tap["wrong_samples"]),
        )  # fmt: skip
    out = io.StringIO()
    Console(width=120, file=out).print(grid)
    return out.getvalue()
