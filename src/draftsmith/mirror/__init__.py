"""`mirror: s3://bucket/prefix`: a run's data, checkpoints, reports and export are copied there as they
appear, and a run goes on from there in an empty folder. docs/mirror.md.

`following(cfg)` is all that the pipeline needs. A thread looks at the run's folder every POLL_S
seconds; the stages know nothing of it.
"""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from draftsmith.bucket import Bucket
from draftsmith.config import RunConfig
from draftsmith.core import FaultFound, UserError
from draftsmith.mirror import catalogue as catalogues
from draftsmith.mirror import restore as restoring
from draftsmith.mirror.catalogue import Catalogue
from draftsmith.mirror.copy import Copier
from draftsmith.mirror.restore import Marker, is_fresh, read_marker, write_marker
from draftsmith.monitor import state

POLL_S = 2.0
STOP_S = 30.0
"""A run that is stopped or fails waits this long for what it has finished to be copied."""


@contextlib.contextmanager
def following(cfg: RunConfig) -> Iterator[None]:
    """For the block, copy what appears. Before it, an empty run's folder is filled from the mirror;
    after it all is copied, or FaultFound says what is not. Raises UserError for a mirror that cannot
    be used.
    """
    if cfg.mirror is None:
        yield
        return
    follower = _Follower(cfg, _opened(cfg, cfg.mirror))
    follower.thread.start()
    try:
        yield
    except BaseException:
        follower.stop()
        follower.thread.join(STOP_S)
        raise
    follower.finish()


def _opened(cfg: RunConfig, uri: str) -> Copier:
    """The mirror, with the run's folder filled from it when that is empty."""
    bucket, mine, owner = Bucket(uri), read_marker(cfg.root), secrets.token_hex(8)
    held = catalogues.read(bucket)
    if mine is not None and mine.mirror != uri:
        mine = None  # this folder's old mirror stays as it is
    if held is None:
        catalogues.refuse_strangers(bucket)
        held = Catalogue(owner, {})
        catalogues.write(bucket, held)
        write_marker(cfg.root, Marker(uri, owner, restored=True))
    elif mine is not None and not mine.restored:
        held = restoring.restore(cfg.root, bucket, held, mine)
    elif mine is None and is_fresh(cfg.root):
        held = restoring.restore(cfg.root, bucket, held, Marker(uri, owner, restored=False))
    elif mine is None:
        raise UserError(
            where=f"mirror: {uri}",
            found=f"another run than the one in {cfg.root}",
            expected="an empty prefix, or this run's mirror",
            remedy="Choose another prefix, or an empty `run:` folder to go on from the mirror.",
        )
    elif mine.owner != held.owner:
        raise catalogues.taken_over(uri)
    return Copier(cfg.root, bucket, held)


class _Follower:
    """The thread that copies, and how it fares."""

    def __init__(self, cfg: RunConfig, copier: Copier) -> None:
        self.thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._cfg, self._copier = cfg, copier
        self._stop = threading.Event()
        self._trouble: str | None = None
        self._broken: BaseException | None = None

    def stop(self) -> None:
        """One more look, then no more."""
        self._stop.set()

    def finish(self) -> None:
        """Wait until all is copied. Raises FaultFound when it cannot be."""
        self.stop()
        self.thread.join()
        if self._broken is not None:
            raise self._broken
        if self._trouble is not None:
            left = self._copier.behind()
            size = sum(left.values()) / 1e6
            cause = (
                f"the mirror {self._copier.bucket} is behind by {len(left)} files, {size:.1f} MB "
                f"({self._trouble})"
            )
            state.fail(self._cfg.root, state.failure_of(cause, ""))
            raise FaultFound(
                f"{cause} The run's own folder is whole; the same command copies the rest."
            )

    def _follow(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self._look(last=False)
            self._look(last=True)
        except BaseException as error:  # finish() raises it in the main thread
            print(f"mirror     ended: {type(error).__name__}: {error}", flush=True)
            self._broken = error

    def _look(self, *, last: bool) -> None:
        try:
            self._copier.copy(last=last)
        except (UserError, OSError) as error:
            self._tell("mirror_behind", str(error))
        else:
            if self._trouble is not None:
                self._tell("mirror_whole", None)

    def _tell(self, kind: str, trouble: str | None) -> None:
        """Say a change once, in the terminal and in events.jsonl."""
        if trouble != self._trouble:
            fields: dict[str, Any] = {"cause": trouble} if trouble else {}
            said = f"is behind, and tried again: {trouble}" if trouble else "has all again"
            print(f"mirror     {self._copier.bucket} {said}", flush=True)
            state.event(self._cfg.root, "mirror", kind, **fields)
        self._trouble = trouble
