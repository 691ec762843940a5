"""manifest.json of a stage's output folder: what it was made from, what it holds, and whether it is
complete.

A stage whose manifest is complete and whose inputs are unchanged is skipped. Changed inputs: a
cheap stage is made again; the output of an expensive one (answers, features, checkpoints) is never
thrown away, the run is refused instead.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.core import UserError
from draftsmith.files import digest, remove_leftovers, write_json

NAME = "manifest.json"


def read(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, or None when there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        assert {"kind", "complete", "inputs", "files"} <= set(manifest), "not a manifest"
        return manifest
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            where=str(path),
            found=f"broken JSON ({error})",
            expected="a manifest",
            remedy="Delete the folder and run the stage again.",
        ) from None


def begin(folder: Path, kind: str, inputs: dict[str, Any], *, remake: bool) -> dict[str, Any]:
    """Open an output folder for these inputs: its manifest, complete (skip the stage) or not (go on
    from its files).

    Raises UserError when the folder holds another input's work and `remake` is False, naming what
    differs.
    """
    inputs = json.loads(json.dumps(inputs))
    if folder.exists() and not folder.is_dir():
        raise UserError(
            where=str(folder), found="a file", expected="a folder", remedy="Move it away."
        )
    manifest = read(folder)
    if (
        manifest is None
        and folder.exists()
        and any(not p.name.startswith(".") for p in folder.iterdir())
    ):
        raise UserError(
            where=str(folder),
            found="files without a manifest",
            expected="an empty folder or a stage's output",
            remedy="Move them away.",
        )
    if manifest is not None and (manifest["kind"] != kind or manifest["inputs"] != inputs):
        if not remake and _holds_work(folder):
            changes = (
                "; ".join(differences(manifest["inputs"], inputs))
                or f"kind {manifest['kind']}, not {kind}"
            )
            raise UserError(
                where=str(folder),
                found=f"work made for other inputs ({changes})",
                expected="output of this configuration",
                remedy=f"Restore the configuration, use another `run:`, or delete {folder} to make it again.",
            )
        shutil.rmtree(folder)
        manifest = None
    if manifest is None:
        manifest = {"kind": kind, "complete": False, "inputs": inputs, "files": {}, "counts": {}}
        write_json(folder / NAME, manifest)
    elif manifest["complete"]:
        manifest["complete"] = not _missing(folder, manifest)
    remove_leftovers(folder)
    return manifest


def _holds_work(folder: Path) -> bool:
    if not folder.exists():
        return False
    return any(p.name != NAME and not p.name.startswith(".") for p in folder.iterdir())


def finish(
    folder: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], counts: dict[str, Any]
) -> dict[str, Any]:
    """Mark the output complete; `files` maps names to at least {"sha256", "bytes"}."""
    done = {
        **manifest,
        "complete": True,
        "files": files,
        "counts": counts,
        "digest": digest([[name, entry["sha256"]] for name, entry in sorted(files.items())]),
    }
    write_json(folder / NAME, done)
    return done


def required(folder: Path, stage: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The complete manifest a later stage stands on, made for these inputs and with all its files.

    Raises UserError when there is none, or when it belongs to another configuration or data: a
    stage run by itself must not mix what does not belong together.
    """
    manifest = read(folder)
    remedy = f"Run `draftsmith {stage} CONFIG` first."
    if manifest is None or not manifest["complete"]:
        found = "no complete output" if manifest is None else "an unfinished output"
        raise UserError(
            where=str(folder), found=found, expected=f"what `{stage}` writes", remedy=remedy
        )
    changes = differences(manifest["inputs"], json.loads(json.dumps(inputs)))
    if changes:
        raise UserError(
            where=str(folder),
            found=f"work made for other inputs ({'; '.join(changes)})",
            expected=f"what `{stage}` writes for this configuration and data",
            remedy=f"Restore them, or run `draftsmith {stage} CONFIG` again.",
        )
    for name in _missing(folder, manifest):
        raise UserError(
            where=str(folder / name), found="no such file", expected="a whole output", remedy=remedy
        )
    return manifest


def _missing(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Files of a complete output that are gone. Raises UserError for one of another size."""
    missing = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.exists():
            missing.append(name)
        elif path.stat().st_size != entry["bytes"]:
            raise UserError(
                where=str(path),
                found=f"{path.stat().st_size} bytes",
                expected=f"{entry['bytes']}, as it was written",
                remedy="The file is damaged: delete it and run the stage that wrote it again.",
            )
    return missing


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Dotted keys whose values differ, with both."""
    if isinstance(old, dict) and isinstance(new, dict):
        out = []
        for name in sorted({*old, *new}):
            out += differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return out
    return [] if old == new else [f"{key} was {_short(old)}, is now {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
