"""Which source `features.source: auto` takes, and why: a store is written once and read in every
epoch, live runs the target beside the trainer in every epoch and writes nothing.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Choice:
    """A source and the reason for it, as a sentence."""

    source: Literal["store", "live"]
    reason: str


def choose_source(
    sizes: dict[str, int],
    codec: str,
    *,
    room_bytes: int | None,
    place: str,
    max_bytes: int | None = None,
) -> Choice:
    """The store when the features of this codec fit where they would go, else live.

    `sizes`: bytes still to be written for each codec. `room_bytes`: what is free there; None: not
    bounded, as on S3. `max_bytes`: what the configuration allows.
    """
    need, free = sizes[codec], f"free at {place}"
    if max_bytes is not None and (room_bytes is None or max_bytes < room_bytes):
        room_bytes, free = max_bytes, "that features.max_bytes allows"
    if room_bytes is None:
        return Choice("store", f"{amount(need)} of features (codec {codec}) go to {place}")
    if need <= room_bytes:
        return Choice(
            "store",
            f"{amount(need)} of features (codec {codec}) fit the {amount(room_bytes)} {free}",
        )
    others = {name: size for name, size in sizes.items() if name != codec and size <= room_bytes}
    text = f"{amount(need)} of features (codec {codec}) do not fit the {amount(room_bytes)} {free}"
    if others:
        fits = ", ".join(f"extract.codec: {name} ({amount(size)})" for name, size in others.items())
        return Choice("live", f"{text}; {fits} would")
    smallest = min(sizes, key=lambda name: sizes[name])
    return Choice("live", f"{text}, nor would {smallest}, the smallest ({amount(sizes[smallest])})")


def amount(num_bytes: float) -> str:
    """Bytes with three digits and a decimal unit."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, size = next((pair for pair in units if num_bytes >= pair[1]), ("B", 1.0))
    value = num_bytes / size
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
