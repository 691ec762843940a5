"""doctor: what will work here, before weights are loaded."""

import json
import shutil

import pytest
from runs import resume, write_config

import s3_servers
from draftsmith import doctor
from draftsmith.cli import main


def findings(capsys, path, *args) -> tuple[int, dict[str, dict]]:
    code = main(["doctor", str(path), "--json", *map(str, args)])
    return code, {line["name"]: line for line in json.loads(capsys.readouterr().out)}


def test_a_good_configuration_has_no_problem_and_says_what_it_takes(tmp_path, capsys):
    code, said = findings(capsys, write_config(tmp_path))
    assert code == 0 and all(line["level"] != "problem" for line in said.values())
    assert "qwen3_5_text, 8 layers" in said["target"]["found"]
    assert (
        "assistant" in said["chat template"]["found"]
        and "<|im_end|>" in said["end of turn"]["found"]
    )
    assert "2 layers, block 4" in said["drafter"]["found"]
    assert said["plan"]["level"] == "warning", "nothing is prepared yet"
    assert main(["doctor", str(tmp_path / "config.yaml")]) == 0
    assert "a prompt ends with" in capsys.readouterr().out


def test_each_mistake_is_a_line_and_the_rest_go_on(tmp_path, capsys):
    code, said = findings(
        capsys, write_config(tmp_path), "--prepare.sources", "[{path: nowhere.jsonl}]",
        "--features.taps", "[1, 99]", "--tokenize.template_kwargs", "{enable_thinking: false}",
        "--run", tmp_path / "config.yaml" / "run",
    )  # fmt: skip
    assert code == 1
    assert said["nowhere.jsonl"]["level"] == "problem"
    assert "99" in said["drafter"]["found"] and said["drafter"]["level"] == "problem"
    assert said["run"]["level"] == "problem"
    assert "does not read it" in said["template_kwargs"]["found"]
    assert said["target"]["level"] == "ok"


def test_a_folder_that_cannot_be_written_is_a_problem_and_one_message(tmp_path, capsys):
    path = write_config(tmp_path, supervise={"enabled": True})
    code, said = findings(capsys, path, "--run", "/proc/self/draftsmith")
    assert code == 1 and said["run"]["level"] == "problem"
    for command in (["run"], ["run", "--detach"], ["prepare"]):
        assert main([*command, str(path), "--run", "/proc/self/draftsmith"]) == 2
        assert "Choose another `run:`" in capsys.readouterr().err


def test_a_disk_too_small_for_checkpoints_is_a_problem(tmp_path, capsys, monkeypatch, extracted):
    path = resume(extracted, tmp_path, "extract")
    code, said = findings(capsys, path)
    assert code == 0 and said["checkpoints"]["level"] == "ok"
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    code, said = findings(capsys, path)
    assert code == 1 and said["checkpoints"]["level"] == "problem"
    assert "keep_checkpoints" in said["checkpoints"]["remedy"]


def test_s3_is_tried_with_a_tiny_object(tmp_path, capsys, moto, monkeypatch):
    s3_servers.use(monkeypatch, moto.url)
    where = f"s3://{s3_servers.BUCKET}/doctor"
    path = write_config(tmp_path)
    code, said = findings(capsys, path, "--features.store", where, "--mirror", f"{where}-mirror")
    assert code == 0 and "put, read and deleted" in said["features.store"]["found"]
    assert said["mirror"]["level"] == "ok"
    code, said = findings(capsys, path, "--features.store", "s3://no-such-bucket/x")
    assert code == 1 and "no-such-bucket" in said["features.store"]["found"]


@pytest.mark.parametrize(
    "version, said",
    [("0.21.0", "refuses to start"), ("0.23.0", "fewer states"), ("0.24.0", "all-zero"), ("0.25.1", None)],
)  # fmt: skip
def test_known_extractors_by_version(version, said, tmp_path, capsys, monkeypatch):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: version if name == "vllm" else real(name))
    _, lines = findings(capsys, write_config(tmp_path))
    line = lines[f"vLLM {version}"]
    assert (line["level"] == "warning") == (said is not None)
    assert said is None or said in line["found"]


def test_kernels_that_would_break_a_cpu_are_a_problem(tmp_path, capsys, monkeypatch):
    real = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: object() if name == "fla" else real(name)
    )
    code, said = findings(capsys, write_config(tmp_path))
    assert code == 1 and "pip uninstall" in said["kernels"]["remedy"]
