"""Files of vLLM and hs-connectors, made by those packages (data/foreign/make.py), and those that are
written for speculators.
"""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from hs_connectors import FileTransfer, FP8Transfer
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from runs import resume
from safetensors.torch import load_file, save_file

from draftsmith.cli import main
from draftsmith.config import FilesConfig, TargetConfig
from draftsmith.core import Sample, UserError
from draftsmith.store.foreign import ForeignStates, in_fp8, through_fp8
from draftsmith.store.reader import StoreReader
from draftsmith.target.forward import StatesForward
from draftsmith.target.load import load_target
from tiny_models import assets

DATA = Path(__file__).parents[1] / "data" / "foreign"
IDS, TAPS, LAYERS, HIDDEN = [2, 4, 6, 8], [1, 3, 5], 8, 256


def states_of(folder, *, taps=TAPS, final="state", **files):
    """ForeignStates of a folder of the built-in target's files."""
    config = FilesConfig(**{"path": str(folder), "layer_ids": IDS, **files})
    return ForeignStates(config, taps, final=final, num_layers=LAYERS, hidden_size=HIDDEN,
                         dtype=torch.bfloat16)  # fmt: skip


def samples():
    """The samples of make.py."""
    ids = [
        load_file(p)["token_ids"].tolist() for p in sorted((DATA / "vllm").glob("*.safetensors"))
    ]
    return [Sample(n, one, [1] * len(one)) for n, one in enumerate(ids)]


def test_files_of_vllm_are_our_own_states():
    """Tap i is their id i + 1, and their id N is the last layer before the final norm."""
    target = load_target(
        TargetConfig(model=str(assets() / "tiny-hybrid"), dtype="float32", device="cpu")
    )
    ours = StatesForward(target, TAPS, "state", torch.bfloat16)
    read = states_of(DATA / "vllm")
    read.check(samples())
    for sample in samples():
        (mine,), (its,) = ours([sample]).features(), read([sample]).features()
        for a, b in ((mine.hidden, its.hidden), (mine.extra["final"], its.extra["final"])):
            torch.testing.assert_close(a.float(), b.float(), rtol=0.01, atol=0.01)
        shifted = torch.cat([its.hidden[:, 1:], its.extra["final"][:, None]], 1)
        assert (shifted - mine.hidden).norm() > 0.3 * mine.hidden.norm(), "layers must differ"
    (few,) = states_of(DATA / "vllm", taps=[3], final="none")([samples()[0]]).features()
    (mine,) = ours([samples()[0]]).features()
    torch.testing.assert_close(
        few.hidden.float(), mine.hidden[:, 1:2].float(), rtol=0.01, atol=0.01
    )
    assert few.extra == {}


def test_files_in_8_bits_are_unpacked_as_their_package_does():
    read = states_of(DATA / "fp8", codec="fp8")
    exact = states_of(DATA / "vllm")
    transfer = FP8Transfer(DATA / "fp8")
    for n, sample in enumerate(samples()):
        (mine,) = read([sample]).features()
        its = transfer.get_generated(
            {"hidden_states_path": DATA / "fp8" / f"cmpl-{n}-0.safetensors"}
        )
        assert its is not None
        # the package multiplies in bf16, here it is fp32
        torch.testing.assert_close(mine.hidden, its["hidden_states"][:, :3], rtol=2**-7, atol=0)
        (true,) = exact([sample]).features()
        whole = torch.cat([true.hidden, true.extra["final"][:, None]], 1)
        assert torch.equal(
            torch.cat([mine.hidden, mine.extra["final"][:, None]], 1), through_fp8(whole)
        )
        codes, scales = quantize_tensor_to_fp8(whole)
        ours = in_fp8(whole)
        assert torch.equal(codes.view(torch.uint8), ours[0].view(torch.uint8))
        assert torch.equal(scales, ours[1])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"layer_ids": [1, 3, 5, 8]},
            r"2 among them, for tap 1 \(id k is the state after k layers\)",
        ),
        ({"layer_ids": [2, 4, 6, 7]}, "8 among them, for features.final: state"),
        ({"layer_ids": [2, 4, 6, 7, 8]}, r"\[7, 4, 256\]; expected \[7, 5, 256\]"),
        ({"codec": "fp8"}, "states of codec none"),
        ({"path": str(DATA / "fp8")}, "states of codec fp8"),
        ({"path": str(DATA)}, r"no \*\.safetensors"),
    ],
)
def test_files_that_are_not_what_the_configuration_says(files, words):
    with pytest.raises(UserError, match=words):
        states_of(DATA / "vllm", **files)([samples()[0]]).features()


def test_unfinished_broken_and_missing_files(tmp_path):
    folder = tmp_path / "files"
    shutil.copytree(DATA / "vllm", folder)
    lock = folder / "cmpl-1-0.safetensors.lock"
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="a file that is being written"):
            states_of(folder)
    other = Sample(9, [1, 2, 3], [1, 1, 1])
    with pytest.raises(UserError, match="the tokens of 1 of 4 samples .first: sample 9, 3 tokens"):
        states_of(folder).check([*samples(), other])
    path = folder / "cmpl-1-0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"cmpl-1-0\.safetensors"):
        states_of(folder)
    save_file({"states": torch.zeros(2)}, path)
    with pytest.raises(UserError, match=r"expected token_ids and hidden_states"):
        states_of(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory, extracted):
    """A run whose store keeps the final states."""
    features = {"taps": TAPS, "final": "state"}
    config = resume(extracted, tmp_path_factory.mktemp("own"), "tokenize", features=features)
    assert main(["extract", str(config)]) == 0
    return config


def again(run, tmp_path, **files):
    """A run on the same tokens whose states come from files; its CONFIG arguments."""
    copy = tmp_path / "again"
    shutil.copytree(run.parent / "run" / "data", copy / "data")
    args = [str(run), "--run", str(copy), "--extract.files", json.dumps(files)]
    return copy / "features", args


@pytest.mark.parametrize("fp8", [False, True])
def test_to_speculators_and_back(run, tmp_path, capsys, fp8):
    store, out = run.parent / "run" / "features", tmp_path / "out"
    assert main(["export-features", str(store), str(out), *(["--fp8"] if fp8 else [])]) == 0
    said = capsys.readouterr().out
    assert "--target-layer-ids 2 4 6" in said and ("--hidden-states-backend fp8" in said) == fp8
    reader, rows = StoreReader(store), load_from_disk(str(out))
    transfer = (FP8Transfer if fp8 else FileTransfer)(out / "hidden_states")
    for row, sample_id in enumerate(reader.sample_ids):
        mine = reader.read(sample_id, ("hidden", "final", "input_ids", "loss_mask"))
        its = transfer.get_cached(row)
        assert its is not None and its["token_ids"].tolist() == rows[row]["input_ids"].tolist()
        assert rows[row]["input_ids"].tolist() == mine["input_ids"].tolist()
        assert rows[row]["loss_mask"].tolist() == mine["loss_mask"].tolist()
        assert rows[row]["seq_len"] == len(mine["input_ids"])
        whole = torch.cat([mine["hidden"], mine["final"][:, None]], 1)
        if fp8:
            peak = whole.float().abs().amax((1, 2), keepdim=True)
            error = (its["hidden_states"].float() - whole.float()).abs()
            assert (error <= whole.float().abs() * 2**-3.9 + peak / 448 * 2**-9).all()
        else:
            assert torch.equal(its["hidden_states"], whole)
    codec = "fp8" if fp8 else "none"
    files = {"path": str(out / "hidden_states"), "layer_ids": IDS, "codec": codec}
    new, args = again(run, tmp_path, **files)
    assert main(["extract", *args]) == 0
    assert StoreReader(new).manifest["inputs"]["files"] == {"layer_ids": IDS, "codec": codec}
    for sample_id in reader.sample_ids:
        mine, its = (r.read(sample_id, ("hidden",))["hidden"] for r in (reader, StoreReader(new)))
        assert torch.equal(mine, its) or fp8
    assert main(["verify", str(new), "--recompute", "8"]) == 0
    if not fp8:
        assert main(["train", *args, "--train.max_steps", "1"]) == 0
    assert main(["export-features", str(store), str(out)]) == 2, "a folder that is there"


def test_layers_counted_from_another_end_are_found(run, tmp_path, capsys):
    """z-lab's ids are one less than the servers': files named with them shift every tap by one."""
    store, out = run.parent / "run" / "features", tmp_path / "out"
    assert main(["export-features", str(store), str(out)]) == 0
    files = {"path": str(out / "hidden_states"), "layer_ids": [1, 3, 5, 8]}
    new, args = again(run, tmp_path, **files)
    assert main(["extract", *args, "--features.taps", "[0, 2, 4]"]) == 0
    capsys.readouterr()
    assert main(["verify", str(new), "--recompute", "8", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    for tap in (0, 2, 4):
        said = [f["finding"] for f in found if f["tap"] == tap]
        assert len(said) == 8 and all(f"holds the output of layer {tap + 1}" in s for s in said)


def test_wrong_use(run, tmp_path, capsys):
    _, args = again(run, tmp_path, path="nowhere", layer_ids=IDS)
    assert main(["extract", *args]) == 2 and "no *.safetensors" in capsys.readouterr().err
    assert main(["extract", *args, "--features.final", "argmax"]) == 2
    assert "argmax needs the target" in capsys.readouterr().err
    assert main(["extract", str(run), "--extract.files.layers", "[1]"]) == 2
    assert "layer_ids" in capsys.readouterr().err
    other = tmp_path / "plain"
    shutil.copytree(run.parent / "run" / "data", other / "data")
    plain = [str(run), "--run", str(other), "--features.final", "none"]
    assert main(["extract", *plain]) == 0
    assert main(["export-features", str(other / "features"), str(tmp_path / "out")]) == 2
    assert "--features.final state" in capsys.readouterr().err
