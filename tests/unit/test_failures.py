"""The first cause of a failure, not its last echo, and what kind it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.monitor.failures import KINDS, classify, errors, first_cause

CHAINED = """
def read():
    raise OSError(28, "No space left on device")
try:
    try:
        read()
    except OSError as error:
        raise RuntimeError("writing the shard failed") from error
except RuntimeError:
    raise ValueError("extract: a worker ended")
"""

TORCHRUN = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     loss.backward()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.37 GiB. GPU 1 has a total capacity of
[rank1]: 94.97 GiB of which 1.02 GiB is free.
W1130 02:42:18.648000 20743 elastic/multiprocessing/api.py:1028] Sending process 20749 closing signal SIGTERM
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:11700: Connection reset by peer.
E1130 02:42:18.813000 20743 api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 20750) of binary: python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""

SERVER = """
(EngineCore pid=412) ERROR 11-29 10:11:12 [core.py:1001] EngineCore failed to start.
(EngineCore pid=412) ERROR 11-29 10:11:12 [core.py:1001] Traceback (most recent call last):
(EngineCore pid=412) ERROR 11-29 10:11:12 [core.py:1001]   File "kv_cache_utils.py", line 1, in unify
(EngineCore pid=412) ERROR 11-29 10:11:12 [core.py:9] ValueError: Hybrid KV cache manager is \
disabled but failed to convert the KV cache
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_of_a_real_chain_the_beginning_is_the_cause():
    ran = subprocess.run([sys.executable, "-c", CHAINED], capture_output=True, text=True)
    assert errors(ran.stderr)[0].startswith("OSError: [Errno 28]")
    cause = first_cause([ran.stderr])
    assert cause.kind == "disk full" and "Free space" in cause.remedy


def test_of_torchruns_ranks_the_one_that_failed_first():
    cause = first_cause([TORCHRUN])
    assert cause.kind == "GPU memory" and "Tried to allocate 2.37 GiB" in cause.line
    assert "94.97 GiB" in cause.line, "the message goes on over lines"


def test_a_servers_misleading_last_line_is_an_echo():
    cause = first_cause([SERVER])
    assert cause.kind == "server refuses the architecture"
    assert "See root cause above" not in cause.line


def test_an_echo_alone_is_better_than_nothing_and_the_first_log_comes_first():
    echo = "Traceback (most recent call last):\nRuntimeError: Engine core initialization failed."
    assert first_cause([echo]).kind == "unknown"
    other = "ModuleNotFoundError: No module named 'fla'"
    assert first_cause([echo, other]).kind == "missing package"
    assert first_cause(["all went well", ""]) is None


@pytest.mark.parametrize(
    "line, kind",
    [
        ("RuntimeError: CUDA error: out of memory", "GPU memory"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk full"),
        ("UserError: x: found a full disk (0.001 GB free); expected room", "disk full"),
        ("Memory cgroup out of memory: Killed process 77 (python)", "host memory or killed"),
        ("process 41 died without a word (killed, or out of memory)", "host memory or killed"),
        ("GenericError: SignatureDoesNotMatch: the request signature", "S3 credentials"),
        ("ConnectionError: [Errno 111] Connection refused", "S3 or network"),
        ("the mirror s3://b/a is behind (no usable answer from the object store)", "S3 or network"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "NCCL or rendezvous"),
        ("RuntimeError: The server socket has failed to listen: EADDRINUSE", "NCCL or rendezvous"),
        ("RuntimeError: CUDA error: no kernel image is available for execution", "kernel not built for this GPU"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072",
         "kernel not built for this GPU"),
        ("ImportError: cannot import name 'causal_conv1d'", "missing package"),
        ("UserError: train step 5: found loss nan, gradient norm nan on samples [7]", "not finite"),
        ("RuntimeError: Error(s) in loading state_dict: size mismatch for fc.weight", "checkpoint mismatch"),
        ("UserError: chats.jsonl:17: found broken JSON", "bad data"),
        ("UserError: runs/a: found another draftsmith process at work in this folder", "the run is locked"),
        ("ValueError: something nobody has seen", "unknown"),
    ],
)  # fmt: skip
def test_kinds_by_their_words(line, kind):
    assert classify(line).kind == kind


def test_every_kind_says_what_to_do():
    assert all(remedy.endswith(".") for _, _, remedy in KINDS)


REAL = Path(__file__).parents[1] / "failures"


@pytest.mark.parametrize(
    "name, kind, words",
    [
        (
            "torchrun-rank-killed",
            "host memory or killed",
            "Signal 9 (SIGKILL) received by PID 31236",
        ),
        ("fla-backward-on-hopper", "kernel not built for this GPU", "produces incorrect results"),
        (
            "vllm-hybrid-kv",
            "server refuses the architecture",
            "ValueError: Failed to promote local KV cache specs to one unified type.",
        ),
        (
            "vllm-first-request",
            "server refuses the architecture",
            "AssertionError: CPU GDN attention requires BF16.",
        ),
    ],
)
def test_logs_of_real_failures(name, kind, words):
    """Of a training of which one rank was killed; of fla-core 0.6.0's backward on an H200; of vLLM 0.32.0
    with a hybrid target: without its manager of hybrid KV caches, and at the first request in fp32
    on a CPU.
    """
    cause = first_cause([(REAL / f"{name}.log").read_text()])
    assert cause.kind == kind and words in cause.line
    assert "====" not in cause.line and "died unexpectedly" not in cause.line


def test_a_server_that_starts_well_has_no_cause():
    """vLLM 0.24.0 warns a dozen times of a module that it does without."""
    text = (REAL / "vllm-starts-well.log").read_text()
    assert text.count("ModuleNotFoundError") > 5 and first_cause([text]) is None
