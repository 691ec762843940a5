"""A mirror names only what it has, whole and of one making; and who may use it. Real S3 servers."""

import json
import re
import shutil

import pytest
from runs import contents, write_config

import s3_servers
from draftsmith import configfile, mirror, pipeline
from draftsmith.bucket import Bucket
from draftsmith.core import Damaged, FaultFound, UserError
from draftsmith.mirror import catalogue, copy, restore
from draftsmith.mirror.catalogue import Catalogue
from draftsmith.mirror.copy import Copier
from draftsmith.monitor import now
from s3_servers import BUCKET

MIRROR = f"s3://{BUCKET}/runs/a"


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The server's folder of the mirror."""
    server = s3_servers.localbucket(tmp_path / "disk")
    s3_servers.use(monkeypatch, server.url, patience_s=2)
    yield tmp_path / "disk" / BUCKET / "runs" / "a"
    server.kill()


def prepare(folder, **keys):
    """The prepare stage of a small run in `folder`."""
    folder.mkdir(exist_ok=True)
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    cfg = configfile.load(write_config(folder, prompts=30), {"mirror": MIRROR, **keys})
    return pipeline.run(cfg, ["prepare"])[0]


def named(disk):
    """The files that the catalogue names."""
    units = json.loads((disk / "mirror.json").read_text())["units"]
    return {path for unit in units.values() for path in unit["files"]}


def test_a_mirror_that_cannot_be_used_is_refused_before_any_work(tmp_path, disk):
    with pytest.raises(UserError, match=r"no such bucket \(nowhere\)"):
        prepare(tmp_path / "a", mirror="s3://nowhere/x")
    with pytest.raises(UserError, match="s3://bucket/prefix"):
        prepare(tmp_path / "a", mirror="elsewhere/x")
    with pytest.raises(UserError, match=r"features\.store"):
        prepare(tmp_path / "a", features__store=f"{MIRROR}/checkpoints/x")
    for name in ("data/mine.txt", "run.yaml"):
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text("not yours")
        with pytest.raises(UserError, match=re.escape(name)):
            prepare(tmp_path / "a")
        (disk / name).unlink()
    assert not (tmp_path / "a" / "run" / "data").exists()


def test_two_folders_never_share_a_mirror(tmp_path, disk):
    prepare(tmp_path / "a")
    prepare(tmp_path / "b", mirror=None)
    with pytest.raises(UserError, match="another run than the one in"):
        prepare(tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "run")
    assert prepare(tmp_path / "b").skipped, "an empty folder takes the mirror over"
    with pytest.raises(UserError, match="went on from another folder"):
        prepare(tmp_path / "a")


def test_a_mirror_left_behind_fails_the_run_and_the_next_one_mends_it(tmp_path, disk):
    prepare(tmp_path / "a", prepare__max_samples=9)
    before = (disk / "mirror.json").read_bytes()
    away, run = tmp_path / "away", tmp_path / "a" / "run"
    (disk / "data").rename(away)
    (disk / "data").write_text("in the way")  # the server cannot write there
    with pytest.raises(FaultFound, match=r"behind by \d+ files.*own folder is whole"):
        prepare(tmp_path / "a")
    state = now.read(run)
    assert state["state"] == "FAILED" and "behind by" in state["failure"]["cause"]
    assert json.loads((run / "data/conversations/manifest.json").read_text())["complete"]
    assert len((disk / "mirror.json").read_bytes()) < len(before), "it names nothing it has not"
    (disk / "data").unlink()
    away.rename(disk / "data")
    assert prepare(tmp_path / "a").skipped
    here = contents(run / "data" / "conversations")
    assert {f"data/conversations/{n}" for n in here if "manifest" not in n} <= named(disk)
    assert contents(disk / "data" / "conversations") == here


def test_what_is_made_again_never_meets_what_was_made_before(tmp_path, disk, monkeypatch):
    """The process dies at each of its writes; what a new machine then finds is of one making, whether
    it asks for the old data or the new.
    """
    run, few, all_of_it = tmp_path / "a" / "run", {"prepare__max_samples": 9}, {}
    writes = {name: getattr(Bucket, name) for name in ("replace_large", "replace", "delete")}
    wanted = []
    for asked in (few, all_of_it):
        prepare(tmp_path / "a", mirror=None, **asked)
        wanted.append(contents(run / "data"))
    shutil.rmtree(run)
    prepare(tmp_path / "a", **few)
    shutil.copytree(disk, tmp_path / "before")
    shutil.copytree(run, tmp_path / "run before")

    def dying(write, left):
        def one(*args):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return write(*args)

        return one

    def put(source, target):
        shutil.rmtree(target)
        shutil.copytree(source, target)

    for allowed in range(30):
        put(tmp_path / "before", disk)
        put(tmp_path / "run before", run)
        left = [allowed]
        with monkeypatch.context() as patched:
            for name, write in writes.items():
                patched.setattr(Bucket, name, dying(write, left))
            dead = False
            try:
                prepare(tmp_path / "a")
            except KeyboardInterrupt:
                dead = True
        shutil.rmtree(tmp_path / "after", ignore_errors=True)
        shutil.copytree(disk, tmp_path / "after")
        for asked, files in zip((few, all_of_it), wanted, strict=True):
            put(tmp_path / "after", disk)
            shutil.rmtree(run)
            prepare(tmp_path / "a", **asked)
            assert contents(run / "data") == files, f"dead after {allowed} writes"
        if not dead:
            assert allowed > 3
            return
    raise AssertionError("the last round lives")


def test_a_checkpoint_is_copied_whole_or_not_and_pruned_ones_go(tmp_path, disk):
    root, held = tmp_path / "run", Catalogue("me", {})
    bucket = Bucket(MIRROR)
    catalogue.write(bucket, held)
    copier = Copier(root, bucket, held)

    def save(step):
        folder = root / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.pt"):
            (folder / name).write_bytes(bytes([step]) * 1000)

    (root / "checkpoints").mkdir(parents=True)
    (root / "checkpoints" / "manifest.json").write_text('{"inputs": 1}')
    save(3)
    (root / "checkpoints" / ".step-4.1@x.tmp").mkdir()
    (root / "checkpoints" / ".step-4.1@x.tmp" / "model.safetensors").write_bytes(b"half")
    copier.copy(last=False)
    step3 = {"checkpoints/step-3/model.safetensors", "checkpoints/step-3/optimizer.pt"}
    assert named(disk) == step3

    save(6)
    shutil.rmtree(root / "checkpoints" / "step-3")
    opened = copy._is

    def pruned(file, sign):  # step-6 goes and step-9 comes while step-6 is about to be read
        if "step-6/optimizer" in file.name:
            shutil.rmtree(root / "checkpoints" / "step-6")
            (root / "checkpoints" / "step-6").mkdir()
            save(9)
            return False
        return opened(file, sign)

    copy._is = pruned
    try:
        copier.copy(last=False)
    finally:
        copy._is = opened
    assert named(disk) == step3, "the old one is kept until a newer one is there"
    copier.copy(last=True)
    assert named(disk) == {name.replace("3", "9") for name in step3}
    assert {p.name for p in (disk / "checkpoints").iterdir() if any(p.glob("*"))} <= {"step-9"}


def test_growing_files_are_copied_in_whole_lines_now_and_then(tmp_path, disk, monkeypatch):
    bucket, held, root = Bucket(MIRROR), Catalogue("me", {}), tmp_path / "run"
    catalogue.write(bucket, held)
    copier = Copier(root, bucket, held)
    path = root / "data" / "answers" / "journal.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"one\ntwo\nthr")
    copier.copy(last=False)
    assert bucket.read("data/answers/journal.jsonl") == b"one\ntwo\n"
    with open(path, "ab") as file:
        file.write(b"ee\nfour\n")
    copier.copy(last=False)
    assert bucket.read("data/answers/journal.jsonl") == b"one\ntwo\n", "not yet"
    monkeypatch.setattr(copy, "GROWN_S", 0)
    copier.copy(last=False)
    assert bucket.read("data/answers/journal.jsonl") == path.read_bytes()


def test_a_restore_that_was_killed_goes_on_and_a_changed_object_is_refused(
    tmp_path, disk, monkeypatch
):
    prepare(tmp_path / "a")
    run, wanted = tmp_path / "a" / "run", contents(tmp_path / "a" / "run" / "data")
    shutil.rmtree(run)
    fetch, calls = restore._fetch, []

    def dies(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        fetch(*args)

    monkeypatch.setattr(restore, "AT_ONCE", 1)
    monkeypatch.setattr(restore, "_fetch", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "a")
    monkeypatch.setattr(restore, "_fetch", fetch)
    part = disk / "data" / "conversations" / "part-00000.parquet"
    kept = part.read_bytes()
    (run / "data" / "conversations" / part.name).unlink(missing_ok=True)
    part.write_bytes(kept[:-1] + b"?")
    with pytest.raises(Damaged, match=r"part-00000.*another file than the mirror names"):
        prepare(tmp_path / "a")
    part.write_bytes(kept)
    assert prepare(tmp_path / "a").skipped
    assert contents(run / "data") == wanted


def test_a_running_mirror_says_when_it_is_behind_and_when_it_has_all(
    tmp_path, disk, monkeypatch, capsys
):
    monkeypatch.setattr(mirror, "POLL_S", 0.01)
    root = tmp_path / "run"
    cfg = configfile.load(write_config(tmp_path, prompts=3), {"mirror": MIRROR})
    with mirror.following(cfg):
        (root / "data" / "tokens").mkdir(parents=True)
        for text in (b"in the way", None):
            if text:
                (disk / "data").write_bytes(text)
            else:
                (disk / "data").unlink()
            (root / "data" / "tokens" / "part-00000.parquet").write_bytes(b"x")
            wait_for(lambda text=text: text is None or (root / "events.jsonl").exists())
    kinds = [json.loads(line)["kind"] for line in (root / "events.jsonl").read_text().splitlines()]
    assert kinds == ["mirror_behind", "mirror_whole"]
    assert "is behind, and tried again" in capsys.readouterr().out
    assert (disk / "data" / "tokens" / "part-00000.parquet").read_bytes() == b"x"


def wait_for(seen):
    import time

    end = time.time() + 60
    while not seen():
        assert time.time() < end
        time.sleep(0.02)
