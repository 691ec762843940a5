"""Writing a store's shards while the next ones are computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from draftsmith.config import Codec
from draftsmith.places import Place
from draftsmith.store.shards import SampleFeatures, write_shard


class ShardWriter:
    """Encodes and writes one shard in a thread while the target computes the next."""

    def __init__(
        self, store: Place, codec: Codec, said: dict[str, str], event: Callable[..., None]
    ) -> None:
        self._store, self._said, self._event = store, said, event
        self._codec: Codec = codec
        self._thread = ThreadPoolExecutor(1, "shard-writer")
        self._pending: tuple[str, Future[None]] | None = None

    def __enter__(self) -> Self:
        return self

    def put(self, name: str, samples: list[SampleFeatures]) -> None:
        """Write this shard once the one before is written. Raises what went wrong there."""
        self._wait()
        job = self._thread.submit(write_shard, self._store, name, samples, self._codec, self._said)
        self._pending = (name, job)

    def _wait(self) -> None:
        if self._pending is not None:
            name, job = self._pending
            self._pending = None
            job.result()
            self._event("shard", name=name)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._thread.shutdown()
