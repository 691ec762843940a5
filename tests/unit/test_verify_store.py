"""Every fault that is planted in a real store is found, with shard, sample and tap; a clean one passes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from runs import write_config

from draftsmith import manifest as manifests
from draftsmith.cli import main
from draftsmith.config import TargetConfig
from draftsmith.recompute import alone
from draftsmith.store.reader import StoreReader
from draftsmith.store.shards import SampleFeatures, shard_name
from draftsmith.target.load import load_target, text_decoder
from stores import Sample, write_store
from tiny_models import assets

TAPS = [1, 3, 5]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a store of the built-in target, in bf16 from fp32 compute."""
    folder = tmp_path_factory.mktemp("verified")
    config = write_config(folder, prompts=12)
    for stage in ("prepare", "regenerate", "tokenize", "extract"):
        assert main([stage, str(config)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def target():
    return load_target(
        TargetConfig(model=str(assets() / "tiny-hybrid"), dtype="float32", device="cpu")
    )


def verify(capsys, store, *args):
    """Exit code and what `verify --json` printed."""
    capsys.readouterr()
    code = main(["verify", str(store), "--json", *map(str, args)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, json.loads(said.out) if said.out else said.err


def planted(run, tmp_path, change, **changed_inputs):
    """A copy of the run whose store, whole by its checksums, was written from changed states:
    `change` gets {sample_id: features}.
    """
    copy = tmp_path / "copy"
    shutil.copytree(run / "data", copy / "data")
    reader = StoreReader(run / "features")
    samples = {}
    for i in reader.sample_ids:
        read = reader.read(i)
        sample = Sample(i, read["input_ids"].tolist(), read["loss_mask"].tolist())
        samples[i] = SampleFeatures(sample, read["hidden"], {})
    change(samples)
    made_from = {**reader.manifest["inputs"], **changed_inputs}
    write_store(copy / "features", list(samples.values()), made_from, per_shard=6)
    return copy / "features"


def set_states(samples, i, edit):
    """Replace sample i's states [n, taps, H] by edit(a copy)."""
    samples[i] = replace(samples[i], hidden=edit(samples[i].hidden.clone()))


def only(found, sample, tap):
    """The findings' texts, which must all be of this sample and tap."""
    assert found["findings"], "nothing was found"
    for finding in found["findings"]:
        assert (finding["sample"], finding["tap"]) == (sample, tap), finding
        assert finding["shard"].startswith("shard-")
    return " ".join(finding["finding"] for finding in found["findings"])


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_a_clean_store_passes(run, tmp_path, capsys, codec):
    store = planted(run, tmp_path, lambda samples: None, codec=codec)
    code, found = verify(capsys, store, "--recompute", 12)
    assert (code, found["findings"]) == (0, [])
    assert found["checked_samples"] == found["samples"] and found["checked_tokens_against_data"]
    for tap in found["taps"]:
        assert tap["wrong_samples"] == 0 and tap["cosine_min"] > 0.99
        assert tap["error_median"] < 1.2 * tap["floor_median"]
    assert main(["verify", str(store)]) == 0 and "no faults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h: h[:, 1].zero_(), "rows (first: 0) are zero"),
        (lambda h: h[2:4, 1].fill_(3.0), "2 of"),
        (lambda h: h[3, 1, 7:8].fill_(torch.nan), "1 of"),
        (lambda h: h[3, 1, 7:8].fill_(-torch.inf), "NaN or infinite"),
        (lambda h: h[4, 1].copy_(h[2, 1]), "rows 2 and 4 are the same"),
    ],
)
def test_impossible_rows(run, tmp_path, capsys, edit, words):
    victim = sorted(StoreReader(run / "features").sample_ids)[2]

    def change(samples):
        sample = samples[victim].sample
        assert sample.input_ids[2] != sample.input_ids[4]
        set_states(samples, victim, lambda h: (edit(h), h)[1])

    code, found = verify(capsys, planted(run, tmp_path, change))
    assert code == 1 and words in only(found, victim, 3)


def test_taps_shifted_by_one(run, tmp_path, capsys, target):
    victim = sorted(StoreReader(run / "features").sample_ids)[0]

    def change(samples):
        layers = alone(target, torch.tensor(samples[victim].sample.input_ids))
        set_states(samples, victim, lambda h: layers[TAPS].transpose(0, 1).to(h.dtype))

    code, found = verify(capsys, planted(run, tmp_path, change), "--recompute", 12)
    said = {f["tap"]: f["finding"] for f in found["findings"] if f["sample"] == victim}
    assert code == 1 and len(said) == len(found["findings"]) == 3
    for tap in TAPS:
        assert f"holds the output of layer {tap - 1}" in said[tap], said


def test_the_last_tap_after_the_final_norm(run, tmp_path, capsys, target):
    victim = sorted(StoreReader(run / "features").sample_ids)[1]

    def norm(states):
        states[:, 2] = text_decoder(target).norm(states[:, 2].float()).to(states.dtype)
        return states

    store = planted(run, tmp_path, lambda samples: set_states(samples, victim, norm))
    code, found = verify(capsys, store, "--recompute", 12)
    assert code == 1 and "after the final norm" in only(found, victim, 5)


def test_rows_of_two_samples_swapped(run, tmp_path, capsys):
    reader = StoreReader(run / "features")
    ids = sorted(reader.sample_ids, key=reader.length)
    one, two = ids[5], ids[6]

    def change(samples):
        n = min(reader.length(one), reader.length(two))
        mine, its = samples[one].hidden.clone(), samples[two].hidden.clone()
        mine[:n], its[:n] = samples[two].hidden[:n], samples[one].hidden[:n]
        samples[one], samples[two] = (
            replace(samples[one], hidden=mine),
            replace(samples[two], hidden=its),
        )

    code, found = verify(capsys, planted(run, tmp_path, change), "--recompute", 12)
    assert code == 1 and {f["sample"] for f in found["findings"]} == {one, two}
    for finding in found["findings"]:
        other = two if finding["sample"] == one else one
        assert f"holds the states of sample {other}" in finding["finding"]


def test_single_rows_of_two_samples_swapped(run, tmp_path, capsys):
    """Few rows leave every median alone: they are found and named, one by one."""
    reader = StoreReader(run / "features")
    ids = sorted(reader.sample_ids, key=reader.length)
    one, two, places = ids[-1], ids[-2], {ids[-1]: 7, ids[-2]: 20}

    def change(samples):
        a, b = samples[one].hidden[7].clone(), samples[two].hidden[20].clone()
        set_states(samples, one, lambda h: h.index_copy(0, torch.tensor([7]), b[None]))
        set_states(samples, two, lambda h: h.index_copy(0, torch.tensor([20]), a[None]))

    code, found = verify(capsys, planted(run, tmp_path, change), "--recompute", 12)
    assert code == 1
    said = {(f["sample"], f["tap"]): f["finding"] for f in found["findings"]}
    assert set(said) == {(i, tap) for i in (one, two) for tap in TAPS}
    for (sample, _), text in said.items():
        other = two if sample == one else one
        n = reader.length(sample)
        assert text == (
            f"1 of {n} rows (first: {places[sample]}) differ: row {places[sample]} holds "
            f"row {places[other]} of sample {other}"
        )


def test_all_states_of_a_sample_are_zero(run, tmp_path, capsys):
    """What vLLM 0.24.0 was seen to leave of hybrids: finite, of the right shape, and nothing."""
    victim = sorted(StoreReader(run / "features").sample_ids)[5]
    store = planted(run, tmp_path, lambda s: set_states(s, victim, torch.zeros_like))
    code, found = verify(capsys, store)
    named = [(f["sample"], f["tap"]) for f in found["findings"]]
    assert code == 1 and named == [(victim, tap) for tap in TAPS]
    assert all("rows (first: 0) are zero" in f["finding"] for f in found["findings"])


def test_a_target_in_bf16_is_held_to_its_own_noise(tmp_path, capsys):
    """Its states differ from fp32 by much more than rounding; a clean store passes all the same, and
    one whose taps are shifted does not.
    """
    config = write_config(tmp_path, prompts=6, target={"dtype": "bfloat16"})
    for stage in ("prepare", "regenerate", "tokenize", "extract"):
        assert main([stage, str(config)]) == 0
    code, found = verify(capsys, tmp_path / "run" / "features", "--recompute", 6)
    assert (code, found["findings"]) == (0, [])
    last = found["taps"][-1]
    assert last["floor_median"] > 3e-3 and last["error_median"] < 1.3 * last["floor_median"]
    victim = sorted(StoreReader(tmp_path / "run" / "features").sample_ids)[3]

    def change(samples):
        set_states(samples, victim, lambda h: h[:, [0, 2, 2]])

    code, found = verify(capsys, planted(tmp_path / "run", tmp_path, change), "--recompute", 6)
    assert code == 1 and "holds the output of layer 5" in only(found, victim, 3)


def test_left_padding_that_leaks(run, tmp_path, capsys, target):
    victim = sorted(StoreReader(run / "features").sample_ids)[4]

    def change(samples):
        ids = samples[victim].sample.input_ids
        layers = alone(target, torch.tensor([0] * 40 + ids))[:, 40:]
        at_taps = layers[[t + 1 for t in TAPS]].transpose(0, 1)
        set_states(samples, victim, lambda h: at_taps.to(h.dtype))

    code, found = verify(capsys, planted(run, tmp_path, change), "--recompute", 12)
    said = {(f["sample"], f["tap"]): f["finding"] for f in found["findings"]}
    assert code == 1 and set(said) == {(victim, tap) for tap in TAPS}
    assert any("padding leaks" in text for text in said.values()), said


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_one_flipped_bit(run, tmp_path, capsys, codec):
    store = planted(run, tmp_path, lambda samples: None, codec=codec)
    reader = StoreReader(store)
    victim = sorted(reader.sample_ids)[3]
    shard, where = reader.shard(victim), reader._where[victim]
    path = store / shard.name
    data = bytearray(path.read_bytes())
    if codec == "lossless":
        frames = shard.of_sample(where.place)["frames"].tolist()
        at = where.begin + (frames[1] + frames[2]) // 2
    else:
        row = (where.end - where.begin) // where.tokens
        at = where.begin + 2 * row + row // 2
    data[at] ^= 1
    path.write_bytes(data)
    code, found = verify(capsys, store)
    named = [f for f in found["findings"] if f["tap"] is not None]
    assert code == 1 and {f["sample"] for f in found["findings"]} == {victim}
    assert [(f["shard"], f["tap"]) for f in named] == [(shard.name, 3)]
    assert "checksum differs" in named[0]["finding"]


def test_a_truncated_shard_and_one_of_another_model(run, tmp_path, capsys):
    other = StoreReader(run / "features").manifest["inputs"]["target"]
    store = planted(run, tmp_path / "a", lambda samples: None)
    alien = planted(
        run, tmp_path / "b", lambda samples: None, target={**other, "weights_digest": "other"}
    )
    shard = store / shard_name(1)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    code, found = verify(capsys, store)
    assert code == 1 and found["findings"][0]["shard"] == shard.name
    assert "cut short" in found["findings"][0]["finding"]
    assert "states are lost from sample" in found["findings"][0]["finding"]
    shard.write_bytes((alien / shard_name(1)).read_bytes())
    code, found = verify(capsys, store)
    assert code == 1 and "weights_digest was" in found["findings"][0]["finding"]
    assert found["findings"][0]["shard"] == shard.name
    shard.unlink()
    code, found = verify(capsys, store)
    assert code == 1 and found["findings"][0]["finding"] == "no such file"
    shard.write_bytes(whole)
    assert verify(capsys, store)[0] == 0


def test_tokens_are_compared_with_the_runs(run, tmp_path, capsys):
    ids = sorted(StoreReader(run / "features").sample_ids)

    def change(samples):
        sample = samples[ids[0]].sample
        other = Sample(ids[0], [*sample.input_ids[:-1], 9], sample.loss_mask)
        samples[ids[0]] = replace(samples[ids[0]], sample=other)
        del samples[ids[1]]

    code, found = verify(capsys, planted(run, tmp_path, change))
    said = {f["sample"]: f["finding"] for f in found["findings"]}
    assert code == 1 and set(said) == set(ids[:2])
    assert "other tokens" in said[ids[0]] and "no states" in said[ids[1]]


def test_wrong_use_and_a_changed_manifest(run, tmp_path, capsys):
    assert verify(capsys, tmp_path)[0] == 2
    assert verify(capsys, run / "features", "--engine", "vllm")[0] == 2
    code, said = verify(capsys, run / "features", "--recompute", 1, "--target", tmp_path)
    assert code == 2, said
    store = planted(run, tmp_path, lambda samples: None)
    text = (store / manifests.NAME).read_text()
    (store / manifests.NAME).write_text(text.replace('"bfloat16"', '"float32"'))
    code, found = verify(capsys, store)
    assert code == 1 and "its checksum differs" in found["findings"][0]["finding"]
