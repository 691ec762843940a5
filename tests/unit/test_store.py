"""A store gives back what was put in, codec by codec; and refuses what is not its own."""

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftsmith import manifest, places
from draftsmith.core import UserError
from draftsmith.features import AHEAD, StoreSource, epoch_plan
from draftsmith.store import index
from draftsmith.store.codec import decode, encode, stored_crc32
from draftsmith.store.reader import StoreReader
from draftsmith.store.shards import shard_name
from stores import TAPS, features, inputs, write_store

BITS = st.integers(0, 2**16 - 1)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    codec=st.sampled_from(["none", "lossless"]),
)
def test_ragged_samples_come_back(tmp_path_factory, lengths, dtype, codec):
    folder = tmp_path_factory.mktemp("store")
    made = features(lengths, getattr(torch, dtype))
    write_store(folder, made, inputs(dtype=dtype, codec=codec, final="argmax"))
    reader = StoreReader(folder)
    assert sorted(reader.sample_ids) == sorted(f.sample.sample_id for f in made)
    for one in made:
        read = reader.read(one.sample.sample_id, ("hidden", "input_ids", "loss_mask", "argmax"))
        assert torch.equal(read["hidden"], one.hidden)
        assert read["input_ids"].tolist() == one.sample.input_ids
        assert read["loss_mask"].tolist() == one.sample.loss_mask
        assert torch.equal(read["argmax"], one.extra["argmax"])
    by_id = {f.sample.sample_id: f for f in made}
    source = StoreSource(folder, sorted(by_id))
    plan = epoch_plan(source.lengths, budget=64, seed=0, epoch=1)
    for row, batch in zip(plan.rows, source.batches(plan.rows, pinned=False), strict=True):
        assert batch.sample_ids == [source.sample_ids[i] for i in row]
        mine = [by_id[sample_id] for sample_id in batch.sample_ids]
        assert torch.equal(batch.hidden, torch.cat([one.hidden for one in mine]))
        assert torch.equal(batch.extra["argmax"], torch.cat([one.extra["argmax"] for one in mine]))
        assert batch.input_ids.tolist() == [i for one in mine for i in one.sample.input_ids]
        assert batch.lengths == [len(one.sample.input_ids) for one in mine]


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_any_safetensors_reader_opens_a_shard_and_the_index_names_each_samples_bytes(
    tmp_path, codec
):
    made = features([5, 1, 17, 8])
    written = write_store(tmp_path, made, inputs(codec=codec))
    with safe_open(tmp_path / shard_name(0), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert json.loads(file.metadata()["taps"]) == [1, 2, 4]
    assert tensors["offsets"].tolist() == [0, 5, 6, 23] and tensors["crc32"].shape == (3, TAPS)
    if codec == "none":
        assert torch.equal(tensors["hidden"], torch.cat([f.hidden for f in made[:3]]))
    if codec == "fp8":
        states = tensors["hidden_fp8"].float() * tensors["hidden_scale"][:, :, None]
        torch.testing.assert_close(
            states, torch.cat([f.hidden for f in made[:3]]).float(), rtol=0.07, atol=0.01
        )
    where = index.read(places.at(tmp_path), written["files"][index.NAME])
    data = (tmp_path / shard_name(0)).read_bytes()
    pieces = [data[where[i].begin : where[i].end] for i in (100, 99, 98)]
    name = {"none": "hidden", "lossless": "hidden_zstd", "fp8": "hidden_fp8"}[codec]
    assert b"".join(pieces) == bytes(tensors[name].view(torch.uint8).numpy().tobytes())


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(BITS, min_size=0, max_size=60), codec=st.sampled_from(["none", "lossless"]))
def test_every_bf16_bit_pattern_survives_a_lossless_store(bits, codec):
    """NaN payloads, infinities, signed zeros and subnormals included; and no rows at all."""
    rows = len(bits) // 6
    words = torch.tensor(bits[: rows * 6], dtype=torch.int32).to(torch.uint16)
    states = words.view(torch.bfloat16).reshape(rows, 3, 2)
    out = round_trip(codec, states)
    assert torch.equal(out.view(torch.int16), states.view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9),
    scale=st.sampled_from([0.0, 1e-40, 1e-30, 1.0, 3e4, 3e38]),
    seed=st.integers(0, 99),
)
def test_fp8_stays_within_its_step(rows, scale, seed):
    """Half a step of 3 mantissa bits for what is normal in 8 bits; rows of zeros stay zeros."""
    generator = torch.Generator().manual_seed(seed)
    states = (torch.randn(rows, 2, 16, generator=generator).clamp(-1, 1) * scale).bfloat16()
    out = round_trip("fp8", states)
    assert torch.isfinite(out).all()
    error, peak = (
        (out.double() - states.double()).abs(),
        states.double().abs().amax(-1, keepdim=True),
    )
    bound = states.double().abs() * (2**-4 + 2**-8) + (peak / 448).clamp_min(2.0**-126) * 2**-9
    assert (error <= bound).all()


def round_trip(codec, states):
    """States through a codec, with the checksums compared on the way."""
    packed = encode(codec, [states])
    data = memoryview(bytearray(b"".join(packed.fields[0].pieces)))
    small = {f.name: torch.frombuffer(bytearray(b"".join(f.pieces)) or bytearray(8), dtype=f.dtype)
             [: torch.Size(f.shape).numel()].reshape(f.shape) for f in packed.fields[1:]}  # fmt: skip
    assert stored_crc32(codec, data, small, states.shape, states.dtype) == packed.crc32[0].tolist()
    out = torch.empty_like(states)
    decode(codec, data, small, out)
    return out


def test_a_broken_frame_is_named_and_never_allocates_what_it_claims(tmp_path):
    write_store(tmp_path, features([30, 40]), inputs(codec="lossless"))
    path = tmp_path / shard_name(0)
    where = StoreReader(tmp_path)._where[99]
    data = bytearray(path.read_bytes())
    for at in range(where.begin, where.begin + 12):
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        with pytest.raises(UserError, match="sample 99"):
            StoreReader(tmp_path).read(99)


def test_another_format_another_shard_and_a_changed_index_are_refused(tmp_path):
    write_store(tmp_path / "a", features([4, 5, 6, 7]), inputs())
    write_store(tmp_path / "b", features([4, 5, 6, 7]), inputs(taps=[1, 2, 3]))
    ours, other = (tmp_path / s / shard_name(0) for s in "ab")
    ours.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="another shard than the manifest names"):
        StoreReader(tmp_path / "a").read(100)
    (tmp_path / "a" / index.NAME).write_bytes((tmp_path / "b" / index.NAME).read_bytes()[:-8])
    with pytest.raises(UserError, match=r"index\.safetensors"):
        StoreReader(tmp_path / "a")
    path = tmp_path / "b" / "manifest.json"
    text = json.loads(path.read_text())
    del text["checksum"]
    path.write_text(json.dumps({**text, "kind": "features/9"}))
    with pytest.raises(UserError, match="a complete store of format features/9"):
        StoreReader(tmp_path / "b")
    with pytest.raises(UserError, match="format features/9, not features/3"):
        manifest.begin(tmp_path / "b", "features/3", inputs(taps=[1, 2, 3]), remake=False)
    with pytest.raises(UserError, match=r"taps was \[1, 2, 4\], is now \[1, 2, 3\]"):
        manifest.required(tmp_path / "a", "extract", inputs(taps=[1, 2, 3]))


def test_of_two_writers_the_first_keeps_its_shard(tmp_path):
    place = places.at(tmp_path)
    place.put_new("x", [memoryview(b"first")])
    place.put_new("x", [memoryview(b"second")])
    assert place.read("x") == b"first" and place.names() == ["x"]
    assert not list(tmp_path.glob(".*"))


def test_batches_are_read_ahead_of_the_trainer_but_not_all_at_once(tmp_path):
    write_store(tmp_path, features([4] * 30), inputs())
    source = StoreSource(tmp_path, list(range(71, 101)))
    begun, lock, read = [], threading.Lock(), source.batch

    def counted(row, buffers):
        with lock:
            begun.append(row)
        return read(row, buffers)

    source.batch = counted
    batches = source.batches([[i] for i in range(30)], pinned=False)
    next(batches)
    assert len(begun) <= AHEAD + 1
    assert [b.sample_ids for b in batches] == [[72 + i] for i in range(29)]


def test_a_fault_while_reading_ahead_reaches_the_trainer(tmp_path):
    write_store(tmp_path, features([4] * 9), inputs())
    path = tmp_path / shard_name(2)
    path.write_bytes(path.read_bytes()[:-200])
    source = StoreSource(tmp_path, list(range(92, 101)))
    with pytest.raises(UserError, match="shard-000002"):
        list(source.batches([[i] for i in range(9)], pinned=False))
