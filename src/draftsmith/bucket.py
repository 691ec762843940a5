"""A prefix of an S3 bucket as a place for whole files (see places.py).

Endpoint and credentials come from the environment, as AWS's own tools take them: AWS_ENDPOINT_URL_S3
or AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION; without
a key, the instance's role.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as failures
from obstore.store import S3Store

from draftsmith.core import Damaged, UserError
from draftsmith.s3_errors import FAILURES, explain, forgotten, is_missing, passing

MAX_NEW_BYTES = 5 * 10**9  # S3's own limit for a copy in one piece
PART_BYTES, PARTS_AT_ONCE = 32 << 20, 4
MOST_PARTS = 9_000  # S3 takes 10,000
LARGE_BYTES = 2 * PART_BYTES
"""Larger objects go in parts, so that a broken connection costs one part, and several flow at once."""
LEFT_AFTER = timedelta(days=1)
"""An object that a writer put aside and that is older was left by one that died."""
PATIENCE_S = 120.0
"""How long a server may be away: reads and writes are tried again with growing pauses."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class Bucket:
    """Objects below s3://bucket/prefix. One that exists is whole: a put appears at once or not."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self.uri, self.bucket, self.prefix = uri.rstrip("/"), parts.netloc, parts.path.strip("/")
        endpoint = next((os.environ[e] for e in ENDPOINTS if os.environ.get(e)), None)
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        patience = float(os.environ.get("DRAFTSMITH_S3_PATIENCE_S", PATIENCE_S))
        options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        self._patience_s = patience
        self._store = S3Store(
            self.bucket,
            prefix=self.prefix or None,
            region=region or "us-east-1",
            disable_bulk_delete=True,  # not every server knows it
            copy_if_not_exists="multipart",  # S3 completes an upload, not a copy, create-only
            # a request carries at most LARGE_BYTES; a server that is gone shows at the connection
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "timeout": timedelta(minutes=5),
                "connect_timeout": timedelta(seconds=10),
            },
            retry_config={
                "max_retries": 100,
                "retry_timeout": timedelta(seconds=patience),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=200),
                    "max_backoff": timedelta(seconds=10),
                    "base": 2,
                },
            },
            **options,
        )

    def __str__(self) -> str:
        return self.uri

    def where(self, name: str) -> str:
        """The object's address, for messages."""
        return f"{self.uri}/{name}"

    def names(self) -> list[str]:
        """Every object below the prefix; hidden ones are writers' own."""
        return sorted(name for name in self._listed() if not _is_hidden(name))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those of the named objects that exist; one listing, however many."""
        wanted = set(names)
        return {name: it["size"] for name, it in self._listed().items() if name in wanted}

    def _listed(self) -> dict[str, Any]:
        with self._explained(self.uri):
            pages = obstore.list(self._store, chunk_size=1000)
            return {self._name(entry["path"]): entry for page in pages for entry in page}

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.prefix}/") if self.prefix else path

    def read(self, name: str) -> bytes | None:
        """A whole object, or None when there is none."""
        with self._explained(self.where(name), missing_is_none=True):
            return bytes(obstore.get(self._store, name).bytes())
        return None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes from `start`. Raises Damaged when they are not there."""
        for begin in range(0, len(out), LARGE_BYTES):
            piece = out[begin : begin + LARGE_BYTES]
            with self._explained(self.where(name)):
                got = obstore.get_range(self._store, name, start=start + begin, length=len(piece))
            if len(got) != len(piece):
                raise Damaged.file(self.where(name), f"no byte {start + begin + len(got)}")
            piece[:] = memoryview(got)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """The bytes start:end of each range; near ones share a request."""
        full = [i for i, (start, end) in enumerate(ranges) if end > start]
        out = [bytearray() for _ in ranges]
        if full:
            starts, ends = [ranges[i][0] for i in full], [ranges[i][1] for i in full]
            with self._explained(self.where(name)):
                got = obstore.get_ranges(self._store, name, starts=starts, ends=ends)
            for i, piece in zip(full, got, strict=True):
                out[i] = bytearray(memoryview(piece))
                if len(out[i]) != ranges[i][1] - ranges[i][0]:
                    raise Damaged.file(self.where(name), f"no byte {ranges[i][0] + len(out[i])}")
        return out

    def put_new(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write an object unless another writer was first; it appears whole."""
        size = sum(map(len, parts))
        if size > MAX_NEW_BYTES:
            raise UserError(
                where=self.where(name),
                found=f"{size / 1e9:.1f} GB in one file",
                expected=f"at most {MAX_NEW_BYTES / 1e9:.0f} GB on S3",
                remedy="Lower extract.shard_bytes.",
            )
        if size > LARGE_BYTES:
            self._patiently(name, lambda: self._put_large(name, parts), again=forgotten)
        else:
            self._put(name, b"".join(parts), "create")

    def _put_large(self, name: str, parts: Sequence[memoryview]) -> None:
        """In parts to a hidden object, which is then copied create-only: S3 has no one request for
        both, and only the completion of an upload can ask for that (If-None-Match).
        """
        if self._exists(name):
            return
        folder, slash, file = name.rpartition("/")
        aside = f"{folder}{slash}.{file}.{uuid.uuid4().hex[:12]}.tmp"
        try:
            obstore.put(
                self._store,
                aside,
                iter(parts),
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
            obstore.copy(self._store, aside, name, overwrite=False)
        finally:
            with contextlib.suppress(*FAILURES):  # else remove_leftovers() will
                obstore.delete(self._store, aside)

    def _exists(self, name: str) -> bool:
        with self._explained(self.where(name), missing_is_none=True):
            obstore.head(self._store, name)
            return True
        return False

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, or what it holds anew."""
        self._put(name, data, "overwrite")

    def replace_large(self, name: str, chunks: Callable[[], Iterator[bytes]], size: int) -> None:
        """The same for `size` bytes that are read while they are sent; `chunks` begins anew when the
        put must be repeated. Its own errors come through.
        """
        if size <= LARGE_BYTES:
            self.replace(name, b"".join(chunks()))
            return

        def put() -> None:
            obstore.put(
                self._store,
                name,
                chunks(),
                chunk_size=max(PART_BYTES, size // MOST_PARTS),
                max_concurrency=PARTS_AT_ONCE,
            )

        self._patiently(name, put, again=forgotten)

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        self._patiently(
            name, lambda: obstore.put(self._store, name, data, mode=mode, use_multipart=False)
        )

    def _patiently(
        self,
        name: str,
        put: Callable[[], object],
        again: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        """Try until the server answers or patience ends: obstore itself repeats no create-only put
        whose connection broke. `again`: other failures that pass (a server that was started anew has
        forgotten the parts it had).
        """
        end, pause = time.monotonic() + self._patience_s, 0.2
        while True:
            try:
                put()
                return
            except failures.AlreadyExistsError:
                return  # another writer's, or ours: the answer to it was lost
            except FAILURES as error:
                if not (passing(error) or again(error)) or time.monotonic() > end:
                    with self._explained(self.where(name)):
                        raise
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def clear(self) -> None:
        """Delete everything below the prefix."""
        self.delete(list(self._listed()))

    def delete(self, names: list[str]) -> None:
        """Delete these objects; one that is gone already is no fault."""
        if names:
            with self._explained(self.uri):
                obstore.delete(self._store, names)

    def remove_leftovers(self) -> None:
        """Delete what writers that died put aside."""
        now = datetime.now(UTC)
        self.delete(
            [
                name
                for name, entry in self._listed().items()
                if _is_hidden(name) and name.endswith(".tmp")
                if now - entry["last_modified"] > LEFT_AFTER
            ]
        )

    def free_bytes(self) -> int | None:
        """A bucket has no end that it tells."""
        return None

    @contextlib.contextmanager
    def _explained(self, where: str, *, missing_is_none: bool = False) -> Iterator[None]:
        """What a failed request means for the user."""
        try:
            yield
        except FAILURES as error:
            if missing_is_none and is_missing(error):
                return
            raise explain(error, where, self.bucket) from error


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")
