"""manifest.json of a stage's output folder: what it was made from, what it holds, and whether it is
complete.

A stage whose manifest is complete and whose inputs are unchanged is skipped. Changed inputs: a
cheap stage is made again; the output of an expensive one (answers, features, checkpoints) is never
thrown away, the run is refused instead.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftsmith import __version__, places
from draftsmith.core import Damaged, UserError
from draftsmith.files import digest
from draftsmith.places import Place

NAME = "manifest.json"
LIBRARIES = ("torch", "transformers", "safetensors")


def read(folder: Path | Place) -> dict[str, Any] | None:
    """The folder's manifest, or None when there is none. Raises Damaged for one that was changed."""
    place = places.at(folder)
    text = place.read(NAME)
    if text is None:
        return None
    try:
        manifest = json.loads(text)
        assert {"kind", "complete", "inputs", "files"} <= set(manifest), "not a manifest"
    except (ValueError, TypeError, AssertionError) as error:
        raise Damaged(
            where=place.where(NAME),
            found=f"broken JSON ({error})",
            expected="a manifest",
            remedy="Delete the folder and run the stage again.",
        ) from None
    # manifests of earlier versions carry none
    if "checksum" in manifest and manifest["checksum"] != _checksum(manifest):
        raise Damaged(
            where=place.where(NAME),
            found="another text than was written: its checksum differs",
            expected="an unchanged manifest",
            remedy="Restore it, or delete the folder and run the stage again.",
        )
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    return digest({key: value for key, value in manifest.items() if key != "checksum"})


def _text(manifest: dict[str, Any]) -> bytes:
    return (json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1) + "\n").encode()


def _write(place: Place, manifest: dict[str, Any]) -> dict[str, Any]:
    place.replace(NAME, _text(manifest))
    return {**manifest, "checksum": _checksum(manifest)}


def versions() -> dict[str, str]:
    """What runs here: draftsmith and the libraries that decide numbers."""
    return {"draftsmith": __version__, **{name: version(name) for name in LIBRARIES}}


def begin(
    folder: Path | Place, kind: str, inputs: dict[str, Any], *, remake: bool
) -> dict[str, Any]:
    """Open an output folder for these inputs: its manifest, complete (skip the stage) or not (go on
    from its files).

    Raises UserError when the folder holds another input's work and `remake` is False, naming what
    differs.
    """
    inputs = json.loads(json.dumps(inputs))
    place = places.at(folder)
    names = place.names()
    manifest = read(place)
    if manifest is None and names:
        raise UserError(
            where=str(folder),
            found="files without a manifest",
            expected="an empty folder or a stage's output",
            remedy="Move them away.",
        )
    if manifest is not None and (manifest["kind"] != kind or manifest["inputs"] != inputs):
        if not remake and any(name != NAME for name in names):
            changes = (
                f"format {manifest['kind']}, not {kind}"
                if manifest["kind"] != kind
                else "; ".join(differences(manifest["inputs"], inputs))
            )
            raise UserError(
                where=str(folder),
                found=f"work made for other inputs ({changes})",
                expected="output of this configuration",
                remedy=f"Restore the configuration, use another `run:`, or delete {folder} to make it again.",
            )
        place.clear()
        manifest = None
    if manifest is None:
        manifest = _first(place, kind, inputs)
    elif manifest["complete"]:
        manifest["complete"] = not _missing(place, manifest)
    if not manifest["complete"] and versions() not in manifest.setdefault("made_by", []):
        manifest = _write(place, {**manifest, "made_by": [*manifest["made_by"], versions()]})
    place.remove_leftovers()
    return manifest


def _first(place: Place, kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an empty output. Of two writers that begin at once the first one's holds."""
    manifest = {"kind": kind, "complete": False, "inputs": inputs, "files": {}, "counts": {}}
    place.put_new(NAME, [memoryview(_text({**manifest, "made_by": [versions()]}))])
    held = read(place)
    if held is None or (held["kind"], held["inputs"]) != (kind, inputs):
        changes = differences(held["inputs"], inputs) if held else ["it is gone"]
        raise UserError(
            where=str(place),
            found=f"another writer that began at the same time ({'; '.join(changes)})",
            expected="one configuration a folder",
            remedy="Use another `run:` or features.store.",
        )
    return held


def finish(
    folder: Path | Place,
    manifest: dict[str, Any],
    files: dict[str, dict[str, Any]],
    counts: dict[str, Any],
) -> dict[str, Any]:
    """Mark the output complete; `files` maps names to at least {"sha256", "bytes"}."""
    done = {
        **manifest,
        "complete": True,
        "files": files,
        "counts": counts,
        "digest": digest([[name, entry["sha256"]] for name, entry in sorted(files.items())]),
    }
    return _write(places.at(folder), done)


def required(folder: Path | Place, stage: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The complete manifest a later stage stands on, made for these inputs and with all its files.

    Raises UserError when there is none, or when it belongs to another configuration or data: a
    stage run by itself must not mix what does not belong together.
    """
    place = places.at(folder)
    manifest = read(place)
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
    for name in _missing(place, manifest):
        raise UserError(
            where=place.where(name), found="no such file", expected="a whole output", remedy=remedy
        )
    return manifest


def is_there(finished: Callable[[], object]) -> bool:
    """Whether a stage's `finished` finds its output. Damaged comes through: it is no missing work."""
    try:
        finished()
    except Damaged:
        raise
    except UserError:
        return False
    return True


def _missing(place: Place, manifest: dict[str, Any]) -> list[str]:
    """Files of a complete output that are gone. Raises Damaged for one of another size."""
    sizes = place.sizes(manifest["files"])
    for name, size in sizes.items():
        expected = manifest["files"][name]["bytes"]
        if size != expected:
            raise Damaged(
                where=place.where(name),
                found=f"{size} bytes",
                expected=f"{expected}, as it was written",
                remedy="The file is damaged: delete it and run the stage that wrote it again.",
            )
    return [name for name in manifest["files"] if name not in sizes]


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
