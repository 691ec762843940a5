"""Writing a store's shards while the next ones are computed, within a budget."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from draftsmith import manifest as manifests
from draftsmith.config import Codec
from draftsmith.core import UserError
from draftsmith.places import Place
from draftsmith.store import index, shards
from draftsmith.store.shards import (
    KIND,
    SampleFeatures,
    open_shard,
    room_taken,
    shard_name,
    write_shard,
)

MANIFEST_BYTES = 16 << 10
"""What a budget keeps back for the manifest's fixed part and the index's header."""
THREADS = 4
"""Shards under way. One thread checks, hashes and writes 0.3-0.5 GB/s; a 27B target on an H200 makes
0.6 GB/s.
"""


class ShardWriter:
    """Encodes and writes shards in threads while the target computes the next.

    `room`: bytes that are left of the store's budget; None: no bound. The shard that does not fit is
    written with the samples that do, and from then on the writer is `full`. With a budget, and
    `in_order`, one shard is begun when the one before is whole.
    """

    def __init__(
        self,
        store: Place,
        codec: Codec,
        said: dict[str, str],
        event: Callable[..., None],
        room: int | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        self._store, self._said, self._event, self._room = store, said, event, room
        self._codec: Codec = codec
        self._most = 1 if in_order or room is not None else THREADS
        self._threads = ThreadPoolExecutor(self._most, "shard-writer")
        self._pending: deque[tuple[str, int, Future[tuple[int, int]]]] = deque()
        self.full = False

    def __enter__(self) -> Self:
        return self

    def put(self, name: str, samples: list[SampleFeatures]) -> None:
        """Write this shard once there is a thread for it, unless the budget is spent. Raises what went
        wrong with an earlier one.
        """
        if len(self._pending) == self._most:
            self._wait()
        if not self.full:
            args = (self._store, name, samples, self._codec, self._said, self._room)
            self._pending.append((name, len(samples), self._threads.submit(write_shard, *args)))

    def _wait(self) -> None:
        """For the first that is under way."""
        name, count, job = self._pending.popleft()
        written, taken = job.result()
        if self._room is not None:
            self._room -= taken
            self.full = written < count
        if written:
            self._event("shard", name=name)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            while kind is None and self._pending:
                self._wait()
        finally:
            self._threads.shutdown()


def room_left(store: Place, sizes: dict[str, int], max_bytes: int) -> int:
    """What the shards that are there, by size, leave of a budget."""
    counts = {name: len(open_shard(store, name).small["sample_ids"]) for name in sizes}
    taken = sum(room_taken(size, counts[name]) for name, size in sizes.items())
    return max_bytes - MANIFEST_BYTES - taken


class WriteThrough:
    """A store that fills while something else goes on, such as the first epoch of a live source:
    samples in any order, until the budget is spent. After a kill it goes on with the samples that it
    lacks; `stored` are those it has.
    """

    def __init__(
        self,
        store: Place,
        inputs: dict[str, Any],
        *,
        max_bytes: int | None,
        shard_bytes: int,
        event: Callable[..., None],
    ) -> None:
        self.place, self._shard_bytes = store, shard_bytes
        self._manifest = manifests.begin(store, KIND, inputs, remake=False)
        self._said = shards.about(self._manifest["inputs"])
        self._names = [name for name in store.names() if name.startswith("shard-")]
        sizes = store.sizes(self._names)
        assert self._names == [shard_name(i) for i in range(len(sizes))], "shards without a gap"
        self.stored = {
            sample_id
            for name in self._names
            for sample_id in open_shard(store, name).small["sample_ids"].tolist()
        }
        room = None if max_bytes is None else room_left(store, sizes, max_bytes)
        self._writer = ShardWriter(store, inputs["codec"], self._said, event, room, in_order=True)
        self._held: list[SampleFeatures] = []
        self._held_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the budget is spent."""
        return self._writer.full or self._manifest["complete"]

    def add(self, features: SampleFeatures) -> bool:
        """Keep a sample. False when the budget is spent: it, and all after it, are not kept."""
        if self.full:
            return False
        if features.sample.sample_id not in self.stored:
            self.stored.add(features.sample.sample_id)
            self._held.append(features)
            self._held_bytes += features.hidden.nbytes
            if self._held_bytes >= self._shard_bytes:
                self._put()
        return not self._writer.full

    def _put(self) -> None:
        self._names.append(shard_name(len(self._names)))
        self._writer.put(self._names[-1], self._held)
        self._held, self._held_bytes = [], 0

    def finish(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Write what is held, the index and the manifest, which is returned; `counts` go into it."""
        with self._writer:
            if self._held:
                self._put()
        if self._manifest["complete"]:
            return self._manifest
        there = self.place.sizes(self._names)
        names = [name for name in self._names if name in there]
        check_some(names, str(self.place))
        entries = index.entries(self.place, names, self._said)
        shown = {"shards": len(names), "samples": entries[index.NAME]["samples"]}
        shown["tokens"] = sum(entry.get("tokens", 0) for entry in entries.values())
        return manifests.finish(self.place, self._manifest, entries, {**shown, **counts})


def check_some(names: list[str], store: str) -> None:
    """A budget that no sample fits into is a mistake."""
    if not names:
        raise UserError(
            where="features.max_bytes",
            found=f"too little for one sample in {store}",
            expected="room for some",
            remedy="Raise it.",
        )
