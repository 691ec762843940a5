"""Reading for the trainer: memory used again only when nobody shows it, shares of ranks, positions."""

import gc
from dataclasses import replace

import pytest
import torch

from draftsmith import places
from draftsmith.core import Damaged
from draftsmith.features import AHEAD, THREADS, StoreSource, epoch_plan
from draftsmith.store.buffers import Buffers
from draftsmith.store.container import read_header
from draftsmith.store.reader import StoreReader
from draftsmith.store.shards import shard_name
from stores import features, inputs, write_store


def test_a_piece_comes_back_once_no_tensor_shows_it():
    buffers = Buffers(64, keep=2, pinned=False)
    tensor, _ = buffers.take((4, 4), torch.bfloat16)
    tensor.fill_(7)
    place, view = tensor.data_ptr(), tensor[3]
    del tensor
    other, _ = buffers.take((4, 4), torch.bfloat16)
    other.fill_(1)
    assert other.data_ptr() != place and (view == 7).all(), "a view keeps it"
    del view
    gc.collect()
    again, _ = buffers.take((2, 2), torch.float32)
    assert again.data_ptr() == place and again.shape == (2, 2)
    kept = [buffers.take((64,), torch.uint8)[0] for _ in range(5)]
    del kept
    assert len(buffers._free) == 2
    with pytest.raises(AssertionError, match="65 bytes in a piece of 64"):
        buffers.take((65,), torch.uint8)


def test_what_a_gpu_still_copies_is_waited_for():
    class Event:
        def __init__(self):
            self.waited = False

        def synchronize(self):
            self.waited = True

    buffers, event = Buffers(8, keep=1, pinned=False), Event()
    tensor, events = buffers.take((8,), torch.uint8)
    events.append(event)
    del tensor, events
    assert not event.waited
    _, events = buffers.take((8,), torch.uint8)
    assert event.waited and events == []


@pytest.fixture
def source(tmp_path):
    write_store(tmp_path, features([9, 2, 7, 5, 30, 4, 8, 6, 11, 3]), inputs())
    return StoreSource(tmp_path, list(range(91, 101)))


def test_batches_that_are_kept_stay_what_they_were(source):
    rows = epoch_plan(source.lengths, budget=16, seed=0, epoch=0).rows * 4
    kept = list(source.batches(rows, pinned=False))
    for row, batch in zip(rows, kept, strict=True):
        assert torch.equal(batch.hidden, source.batch(row).hidden)


def test_memory_is_used_again(source):
    rows = epoch_plan(source.lengths, budget=16, seed=0, epoch=0).rows * 10
    seen = {batch.hidden.data_ptr() for batch in source.batches(rows, pinned=False)}
    assert len(rows) > 2 * len(seen) and len(seen) <= AHEAD + THREADS + 2


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_a_flipped_bit_is_refused_where_it_is_read_first(tmp_path, codec):
    write_store(tmp_path, features([9, 2, 7, 5]), inputs(codec=codec))
    reader = StoreReader(tmp_path)
    where = reader._where[99]
    path = tmp_path / shard_name(where.shard)
    data = bytearray(path.read_bytes())
    data[where.end - 1] ^= 1  # of the last row's last tap
    path.write_bytes(data)
    with pytest.raises(Damaged, match=rf"{path.name}.*sample 99, tap 4: the checksum differs"):
        StoreSource(reader, [100, 99]).batch([0, 1])
    assert len(reader.read(98)["hidden"]) == 7, "the others are whole"


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
@pytest.mark.parametrize(
    "name", ["input_ids", "loss_mask", "offsets", "sample_ids", "argmax", "crc32", "final"]
)
def test_a_flipped_bit_beside_the_states_is_refused_too(tmp_path, codec, name):
    made = features([9, 2, 7])
    if name == "final":
        made = [replace(one, extra={"final": one.hidden[:, 0].contiguous()}) for one in made]
    write_store(tmp_path, made, inputs(codec=codec))
    path = tmp_path / shard_name(0)
    span = read_header(places.at(tmp_path), path.name).spans[name]
    data = bytearray(path.read_bytes())
    data[span.end - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=f"{name}: the checksum differs"):
        StoreReader(tmp_path).read(
            98, ("hidden", "input_ids", "argmax" if name != "final" else name)
        )


@pytest.mark.parametrize("name", ["sample_ids", "shard", "place", "tokens", "begin", "end"])
def test_a_flipped_bit_in_the_index_is_refused(tmp_path, name):
    write_store(tmp_path, features([9, 2, 7]), inputs())
    path = tmp_path / "index.safetensors"
    span = read_header(places.at(tmp_path), path.name).spans[name]
    data = bytearray(path.read_bytes())
    data[span.begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=f"{name}: the checksum differs"):
        StoreReader(tmp_path)
