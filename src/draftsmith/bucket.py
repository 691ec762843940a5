"""A prefix of an S3 bucket as a place for whole files (see places.py).

Endpoint and credentials come from the environment, as AWS's own tools take them: AWS_ENDPOINT_URL_S3
or AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION; without
a key, the instance's role.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as failures
from obstore.store import S3Store

from draftsmith.core import Damaged, UserError

FAILURES = (failures.BaseError, OSError)  # some of obstore's are Python's own
MAX_PUT_BYTES = 5 * 10**9  # S3's own limit for one create-only put
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
            # a shard of 1 GiB may take minutes; a server that is gone shows at the connection
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "timeout": timedelta(minutes=20),
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
        """Every object below the prefix."""
        with self._explained(self.uri):
            pages = obstore.list(self._store, chunk_size=1000)
            return sorted(self._name(entry["path"]) for page in pages for entry in page)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those of the named objects that exist; one listing, however many."""
        wanted = set(names)
        with self._explained(self.uri):
            pages = obstore.list(self._store, chunk_size=1000)
            found = {self._name(entry["path"]): entry["size"] for page in pages for entry in page}
        return {name: size for name, size in found.items() if name in wanted}

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.prefix}/") if self.prefix else path

    def read(self, name: str) -> bytes | None:
        """A whole object, or None when there is none."""
        with self._explained(self.where(name), missing_is_none=True):
            return bytes(obstore.get(self._store, name).bytes())
        return None

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes from `start`. Raises Damaged when they are not there."""
        if not len(out):
            return
        with self._explained(self.where(name)):
            got = obstore.get_range(self._store, name, start=start, length=len(out))
        if len(got) != len(out):
            raise Damaged.file(self.where(name), f"no byte {start + len(got)}")
        out[:] = memoryview(got)

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
        """Write an object unless another writer was first (If-None-Match: *)."""
        size = sum(map(len, parts))
        if size > MAX_PUT_BYTES:
            raise UserError(
                where=self.where(name),
                found=f"{size / 1e9:.1f} GB in one file",
                expected=f"at most {MAX_PUT_BYTES / 1e9:.0f} GB on S3",
                remedy="Lower extract.shard_bytes.",
            )
        self._put(name, b"".join(parts), "create")

    def replace(self, name: str, data: bytes) -> None:
        """Write an object, or what it holds anew."""
        self._put(name, data, "overwrite")

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        """Try until the server answers or patience ends: obstore itself repeats no create-only put
        whose connection broke.
        """
        end, pause = time.monotonic() + self._patience_s, 0.2
        while True:
            try:
                obstore.put(self._store, name, data, mode=mode, use_multipart=False)
                return
            except failures.AlreadyExistsError:
                return  # another writer's, or ours: the answer to it was lost
            except FAILURES as error:
                if not _passing(error) or time.monotonic() > end:
                    with self._explained(self.where(name)):
                        raise
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def clear(self) -> None:
        """Delete everything below the prefix."""
        names = self.names()
        with self._explained(self.uri):
            obstore.delete(self._store, names)

    def remove_leftovers(self) -> None:
        """Nothing is ever left aside: a put appears whole or not at all."""

    def free_bytes(self) -> int | None:
        """A bucket has no end that it tells."""
        return None

    @contextlib.contextmanager
    def _explained(self, where: str, *, missing_is_none: bool = False) -> Iterator[None]:
        """What a failed request means for the user."""
        try:
            yield
        except FAILURES as error:
            if missing_is_none and _is_missing(error):
                return
            raise _explain(error, where, self.bucket) from error


def _is_missing(error: Exception) -> bool:
    no_object = isinstance(error, failures.NotFoundError | FileNotFoundError)
    return no_object and "NoSuchBucket" not in str(error)


def _passing(error: Exception) -> bool:
    """Whether trying again may help: no answer, or a server's own failure."""
    if not isinstance(error, failures.GenericError):
        return False
    return "status 4" not in str(error) and "status: 4" not in str(error)


SAID = (
    # words of the answer; what they mean; what to do
    ("NoSuchBucket", "no such bucket", "Create the bucket, or correct features.store."),
    ("InvalidAccessKeyId", "an unknown access key", "Correct AWS_ACCESS_KEY_ID."),
    ("SignatureDoesNotMatch", "a wrong signature", "Correct AWS_SECRET_ACCESS_KEY."),
    ("InvalidSignature", "a wrong signature", "Correct AWS_SECRET_ACCESS_KEY."),
    ("ExpiredToken", "expired credentials", "Renew the session's credentials."),
    ("PermanentRedirect", "a bucket of another region", "Set AWS_REGION to the bucket's."),
    ("AuthorizationHeaderMalformed", "another region", "Set AWS_REGION to the bucket's."),
    ("169.254", "no credentials", "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
)


def _explain(error: Exception, where: str, bucket: str) -> UserError:
    text = " ".join(str(error).partition("Debug source")[0].split())
    for words, meaning, remedy in SAID:
        if words in text:
            return UserError(
                where=where,
                found=f"{meaning} ({bucket})",
                expected="a bucket that these credentials may use",
                remedy=remedy,
            )
    if _is_missing(error):
        return Damaged.file(where, "no such object")
    if isinstance(error, failures.PermissionDeniedError | failures.UnauthenticatedError):
        return UserError(
            where=where,
            found=f"access denied ({text[:200]})",
            expected="a key that may list, read and write there",
            remedy="Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy.",
        )
    return UserError(
        where=where,
        found=f"no usable answer from the object store ({text[:300]})",
        expected="an S3 server",
        remedy="Check AWS_ENDPOINT_URL, AWS_REGION and the network; the same command goes on from "
        "what is stored.",
    )
