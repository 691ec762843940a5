"""Reading for the trainer: memory used again only when nobody shows it, shares of ranks, positions."""

import gc

import pytest
import torch

from draftsmith.features import AHEAD, THREADS, StoreSource
from draftsmith.store.buffers import Buffers
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
    rows = source.plan(tokens_per_batch=16, seed=0, epoch=0).rows * 4
    kept = list(source.batches(rows, pinned=False))
    for row, batch in zip(rows, kept, strict=True):
        assert torch.equal(batch.hidden, source.batch(row).hidden)


def test_memory_is_used_again(source):
    rows = source.plan(tokens_per_batch=16, seed=0, epoch=0).rows * 10
    seen = {batch.hidden.data_ptr() for batch in source.batches(rows, pinned=False)}
    assert len(rows) > 2 * len(seen) and len(seen) <= AHEAD + THREADS + 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_an_epoch_and_go_on_from_a_position_on_another_number_of_them(
    source, num_ranks
):
    rows = source.plan(tokens_per_batch=16, seed=3, epoch=1).rows
    whole = [batch.sample_ids for batch in source.batches(rows, pinned=False)]
    assert sorted(sum(whole, [])) == source.sample_ids
    begin = 2
    shares = [
        [
            batch.sample_ids
            for batch in source.batches(
                rows, pinned=False, begin=begin, rank=rank, num_ranks=num_ranks
            )
        ]
        for rank in range(num_ranks)
    ]
    merged = [shares[i % num_ranks][i // num_ranks] for i in range(len(rows) - begin)]
    assert merged == whole[begin:]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
