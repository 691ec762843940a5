"""features.max_bytes: the store stays below it, says what fitted, and training uses that."""

import json
from pathlib import Path

import pytest
from runs import contents, write_config

from draftsmith import check_store, configfile, extract, manifest, pipeline, places
from draftsmith.core import FaultFound, UserError
from draftsmith.features import StoreSource, epoch_plan
from draftsmith.store.reader import StoreReader
from draftsmith.store.writer import ShardWriter, WriteThrough
from stores import features, inputs, write_store


def no_event(kind, **fields):
    """Nobody listens."""


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def write_through(folder, samples, codec, max_bytes, shard_bytes=4000):
    store = WriteThrough(
        places.at(folder), inputs(codec=codec), max_bytes=max_bytes, shard_bytes=shard_bytes,
        event=no_event,
    )  # fmt: skip
    kept = [store.add(one) for one in samples]
    return store, kept


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_what_fits_is_kept_and_read_and_no_byte_more(tmp_path, codec):
    made = features([30, 7, 12, 40, 9] * 12)
    write_store(tmp_path / "all", made, inputs(codec=codec))
    whole = size_of(tmp_path / "all")
    stored = []
    for n, share in enumerate((0.9, 0.5, 0.35)):
        folder, limit = tmp_path / str(n), int(whole * share) + (16 << 10)
        store, _ = write_through(folder, made, codec, limit)
        said = store.finish({})
        assert size_of(folder) <= limit
        reader = StoreReader(folder)
        stored.append(reader.sample_ids)
        assert stored[-1] == [one.sample.sample_id for one in made[: len(stored[-1])]]
        assert said["counts"]["samples"] == len(stored[-1]) < len(made)
        room = limit - size_of(folder)
        assert room < 16 * 1024 + 2 * 40 * 3 * 16 * 2, "a few samples' room is left at most"
        source = StoreSource(reader, reader.sample_ids)
        rows = epoch_plan(source.lengths, budget=64, seed=0, epoch=0).rows
        assert sum(len(b.sample_ids) for b in source.batches(rows, pinned=False)) == len(stored[-1])
    assert len(stored[0]) > len(stored[1]) > len(stored[2]) > 0


def test_write_through_goes_on_after_a_kill_and_stops_for_good_when_full(tmp_path):
    made = features([30, 7, 12, 40, 9] * 12)
    first, _ = write_through(tmp_path, made[:20], "none", 90_000)
    first._writer.__exit__(None, None, None)  # what was written counts; what was held is lost
    before = contents(tmp_path)
    assert len(before) > 3 and len(first.stored) == 20
    second, kept = write_through(tmp_path, made, "none", 90_000)
    assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True)
    said = second.finish({"left_out": 1})
    after = contents(tmp_path)
    assert all(after[name] == data for name, data in before.items() if "shard" in name)
    assert size_of(tmp_path) <= 90_000 and said["counts"]["left_out"] == 1
    third, kept = write_through(tmp_path, made, "none", 90_000)
    assert not any(kept) and third.finish({})["counts"] == said["counts"]
    with pytest.raises(UserError, match=r"features\.max_bytes.*one sample"):
        write_through(tmp_path / "b", made, "none", 18_000)[0].finish({})


def test_extraction_stops_at_the_budget_and_training_uses_what_fitted(tmp_path, monkeypatch):
    limit = 1_600_000
    keys = {"features.max_bytes": limit, "extract.tokens_per_batch": 128}
    keys |= {"extract.shard_bytes": 300_000, "train.max_steps": 3, "features.source": "store"}
    path = write_config(tmp_path, prompts=30, regenerate={"enabled": False})
    answered = []
    for line in (tmp_path / "prompts.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        if messages[-1]["role"] == "user":
            messages.append({"role": "assistant", "content": "Yes, of course, I will do so. " * 3})
        answered.append(json.dumps({"messages": messages}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(answered) + "\n")
    cfg = configfile.load(path, keys)
    pipeline.run(cfg, ["prepare"])
    pipeline.run(cfg, ["tokenize"])
    pipeline.run(cfg, ["extract"])
    folder = tmp_path / "run" / "features"
    undisturbed, counts = contents(folder), manifest.read(folder)["counts"]
    assert size_of(folder) <= limit and counts["left_out"] > 0 and counts["shards"] >= 3
    pipeline.run(cfg, ["train"])
    trained = manifest.read(tmp_path / "run" / "checkpoints")["counts"]
    assert 0 < trained["samples"] <= counts["samples"]
    check_store.run(str(folder))
    with pytest.raises(UserError, match="max_bytes was 1600000, is now 1700000"):
        extract.finished(configfile.load(path, {**keys, "features.max_bytes": 1_700_000}))

    write = ShardWriter.put
    for dies_at in (1, counts["shards"] - 1, counts["shards"]):
        (folder / "manifest.json").unlink()
        for name in undisturbed:
            (folder / name).unlink(missing_ok=True)

        def dying(self, name, samples, dies_at=dies_at):
            if name >= f"shard-{dies_at:06d}":
                self._wait()
                raise KeyboardInterrupt
            write(self, name, samples)

        monkeypatch.setattr(ShardWriter, "put", dying)
        with pytest.raises(Exception, match="goes on"):
            pipeline.run(cfg, ["extract"])
        monkeypatch.setattr(ShardWriter, "put", write)
        pipeline.run(cfg, ["extract"])
        assert contents(folder) == undisturbed, f"killed at shard {dies_at}"

    said = manifest.read(folder)
    said["counts"]["left_out"] -= 1
    manifest._write(places.at(folder), said)
    with pytest.raises(FaultFound, match="no states of this sample"):
        check_store.run(str(folder))
