"""What a training reads: features of both splits, from the store or live, and the frozen parts of the
target that the drafter borrows.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

import draftsmith.tokenize as tokenize_stage
from draftsmith import extract, files, places
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.extract.plan import ENGINES, engine_of
from draftsmith.extract.worker import target_forward
from draftsmith.features import Source, StoreSource
from draftsmith.places import Place
from draftsmith.ranks import Ranks
from draftsmith.store.reader import StoreReader, is_complete
from draftsmith.store.writer import WriteThrough
from draftsmith.target.load import device_of, final_norm, inspect_target, load_outside, unembed
from draftsmith.target.selftest import self_test
from draftsmith.tokenize.samples import Samples
from draftsmith.train.live import LiveSource

LIVE = re.compile(r"live-\d+-of-\d+")
PROBES = 8  # samples of the packed rows' self-test


@dataclass(frozen=True)
class Opened:
    """`source` has the training samples, each with `num_anchors` places for a block; `held_out` the
    `held_out_samples` that verdicts are made on. `shared`: embedding, lm_head and soft cap; `norm`: the
    target's final one, for losses on its distribution.
    """

    source: Source
    num_anchors: list[int]
    held_out: Source
    held_out_samples: Sequence[Sample]
    shared: tuple[Tensor, Tensor, float]
    norm: nn.Module | None


def open_source(
    cfg: RunConfig,
    tokens: dict[str, Any],
    taps: list[int],
    kind: Literal["store", "live"],
    ranks: Ranks,
    loaded: Callable[[str], None] = lambda what: None,
) -> Opened:
    """Open what `kind` says; `loaded` is told of each part."""
    train = tokenize_stage.read_samples(cfg, tokens, "train")
    held_out = tokenize_stage.read_samples(cfg, tokens, "held_out")
    loaded("tokens")
    if kind == "store":
        reader = StoreReader(cfg.store)  # which holds fewer samples with features.max_bytes
        train, held_out = train.among(reader.sample_ids), held_out.among(reader.sample_ids)
        chosen = _chosen(cfg, held_out)
        source = StoreSource(reader, train.sample_ids)
        shown = StoreSource(reader, [sample.sample_id for sample in chosen])
        shared, norm = frozen_of(cfg)
        loaded("the target's embedding and lm_head")
        return Opened(source, train.num_anchors, shown, chosen, shared, norm)
    train.check_vocabulary(inspect_target(cfg.target).vocab_size)
    chosen = _chosen(cfg, held_out)
    engine = engine_of(cfg, inspect_target(cfg.target), places.at(cfg.store))
    forward = target_forward(cfg, engine, taps)
    loaded("target")
    if engine == ENGINES["packed"]:
        self_test(forward, train[:PROBES])
        loaded("self-test")
    keep, stored = _kept(cfg, engine, ranks)
    row_tokens = cfg.extract.tokens_per_batch
    source = LiveSource(
        forward, train, row_tokens=row_tokens, keep=keep, stored=stored,
        all_stored=None if cfg.features.max_bytes is None else lambda: _finished(cfg, ranks),
    )  # fmt: skip
    shown = LiveSource(forward, chosen, row_tokens=row_tokens)
    norm = final_norm(forward.model) if cfg.train.loss != "ce" else None
    return Opened(source, train.num_anchors, shown, chosen, unembed(forward.model), norm)


def _chosen(cfg: RunConfig, held_out: Samples) -> list[Sample]:
    """At most train.verdict_prompts of those with an answer of two tokens, by a hash of the tokens."""
    answered = [i for i, n in enumerate(held_out.num_anchors) if n]
    hashed = sorted(answered, key=lambda i: files.digest([cfg.seed, held_out[i].input_ids]))
    return [held_out[i] for i in hashed[: cfg.train.verdict_prompts]]


def frozen_of(cfg: RunConfig) -> tuple[tuple[Tensor, Tensor, float], nn.Module | None]:
    """Of the target, the rest of which is dropped again."""
    model = load_outside(cfg.target.model_copy(update={"device": "cpu"}))
    embedding, head, softcap = unembed(model)
    place = device_of(cfg.target)
    norm = copy.deepcopy(final_norm(model)).to(place) if cfg.train.loss != "ce" else None
    table = embedding.detach().clone().to(place)
    shared = (table, table if head is embedding else head.detach().clone().to(place), softcap)
    return shared, norm


def _kept(
    cfg: RunConfig, engine: str, ranks: Ranks
) -> tuple[WriteThrough | None, list[StoreReader]]:
    """With features.max_bytes: this rank's store, to be filled, and those that are finished, by any number of
    ranks: where one is of another number, the first epoch is over, and what fitted is there.
    """
    if cfg.features.max_bytes is None:
        return None, []
    inputs = {**extract.wanted(cfg), "engine": f"{engine}, beside the trainer"}
    mine, own = _store_of(cfg, ranks), f"-of-{ranks.count}"
    if ranks.lead:
        for name, place in _live_stores(cfg):
            if not name.endswith(own) and not is_complete(place):
                place.clear()  # of an epoch that was not ended: nobody reads it, and its bytes count
    ranks.barrier()
    finished = {name: place for name, place in _live_stores(cfg) if is_complete(place)}
    readers = [StoreReader(place) for place in finished.values()]
    for place, reader in zip(finished.values(), readers, strict=True):
        _check_inputs(place, reader.manifest["inputs"], inputs)
    if is_complete(mine) or not all(name.endswith(own) for name in finished):
        return None, readers
    keep = WriteThrough(
        mine, inputs, max_bytes=cfg.features.max_bytes // ranks.count,
        shard_bytes=cfg.extract.shard_bytes, event=lambda *args, **fields: None,
    )  # fmt: skip
    return keep, readers


def _finished(cfg: RunConfig, ranks: Ranks) -> list[StoreReader]:
    """Of all ranks, once each has got so far."""
    ranks.barrier()
    return [StoreReader(place) for _, place in _live_stores(cfg) if is_complete(place)]


def _live_stores(cfg: RunConfig) -> list[tuple[str, Place]]:
    """All ranks' stores, of this and other numbers of ranks."""
    names = {name.split("/")[0] for name in places.at(cfg.store).names()}
    found = sorted(name for name in names if LIVE.fullmatch(name))
    return [(name, places.at(f"{cfg.store}/{name}")) for name in found]


def _check_inputs(place: Place, held: dict[str, Any], inputs: dict[str, Any]) -> None:
    if changes := manifests.differences(held, json.loads(json.dumps(inputs))):
        raise UserError(
            where=str(place),
            found=f"features made for other inputs ({'; '.join(changes)})",
            expected="those of this configuration and data",
            remedy=f"Delete {place}, or use another features.store.",
        )


def _store_of(cfg: RunConfig, ranks: Ranks) -> Place:
    return places.at(f"{cfg.store}/live-{ranks.rank + 1}-of-{ranks.count}")
