"""mirror.json: what a mirror holds. It is the mirror's only truth: a file counts once it is named
here with its checksum, and is named only while the object is that file.

Stages' manifests are kept inside, as text, so that a manifest and the files made for it change in one
put: a folder that was made again never meets files of before.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.bucket import Bucket
from draftsmith.core import Damaged, UserError
from draftsmith.files import digest
from draftsmith.mirror.scan import SINGLE

NAME = "mirror.json"
KIND = "mirror/1"
FOLDERS = ("data", "checkpoints", "eval", "export")
"""What a mirror writes below its prefix."""


@dataclass(frozen=True)
class Entry:
    """A file that the mirror holds."""

    bytes: int
    sha256: str


@dataclass
class Held:
    """A unit (scan.py): its marker's text, and its files by their path in the run's folder."""

    marker: str | None
    files: dict[str, Entry] = field(default_factory=dict)


@dataclass
class Catalogue:
    """All units, and a word for the run's folder that writes here; a run that goes on elsewhere takes
    another.
    """

    owner: str
    units: dict[str, Held]


def read(bucket: Bucket) -> Catalogue | None:
    """What the mirror holds; None for an empty one."""
    text = bucket.read(NAME)
    if text is None:
        return None
    where = bucket.where(NAME)
    try:
        said = json.loads(text)
        checksum = said.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged.file(where, f"{type(error).__name__}: {error}") from None
    if said.get("kind") != KIND:
        raise UserError(
            where=where,
            found=f"a mirror of format {said.get('kind')}",
            expected=KIND,
            remedy="Use a matching version of draftsmith, or another prefix.",
        )
    if checksum != digest(said):
        raise Damaged.file(where, "its checksum differs")
    units = {
        name: Held(unit["marker"], {path: Entry(**entry) for path, entry in unit["files"].items()})
        for name, unit in said["units"].items()
    }
    return Catalogue(said["owner"], units)


def write(bucket: Bucket, catalogue: Catalogue) -> None:
    """Replace it."""
    said: dict[str, Any] = {"kind": KIND, **asdict(catalogue)}
    bucket.replace(NAME, json.dumps({**said, "checksum": digest(said)}, indent=1).encode() + b"\n")


def check_owner(bucket: Bucket, catalogue: Catalogue) -> None:
    """Raises UserError when another folder has gone on with this mirror, or it is gone."""
    now = read(bucket)
    if now is None or now.owner != catalogue.owner:
        raise taken_over(bucket.uri)


def taken_over(uri: str) -> UserError:
    """Two folders of one run would overwrite each other's work."""
    return UserError(
        where=f"mirror: {uri}",
        found="a mirror with which the run went on from another folder",
        expected="the mirror as this folder left it",
        remedy="Go on there; or use an empty `run:` folder to go on from the mirror; or another prefix.",
    )


def refuse_strangers(bucket: Bucket) -> None:
    """A prefix with files that no mirror wrote is somebody's."""
    names = [name for name in bucket.names() if name.split("/")[0] in (*FOLDERS, *SINGLE)]
    if names:
        raise UserError(
            where=f"mirror: {bucket.uri}",
            found=f"files without a {NAME} (such as {names[0]})",
            expected="an empty prefix, or a run's mirror",
            remedy="Choose another prefix.",
        )
