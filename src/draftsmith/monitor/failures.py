"""Why a run failed: the first cause in what its processes said, not the last echo, and what to change.

An error travels: a worker raises, its parent raises that the worker died, torchrun that a child failed,
a server that its engine core did not start. The cause is the first error in time, and in a chain of
exceptions the one at its beginning. Causes are told apart by the words that libraries use; fixtures of real
logs are in tests/failures.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

CHAIN = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
TRACEBACK = "Traceback (most recent call last)"
PREFIX = re.compile(
    r"^(?:\[rank\d+\]:\s?|\(\w+(?: \w+=\S+)*(?: pid=\d+)?\)\s|"
    r"(?:ERROR|WARNING|INFO|E|W|I)\s?\S* \d\d[-:]\d\d\S* \[[^\]]*\]\s?|(?:ERROR|CRITICAL|FATAL):?\s)+"
)
"""What torchrun, vLLM and loggers put before each line of a traceback."""
LOGGED = re.compile(r"[EWIF]\d{4} \d\d:\d\d:\d\d|draftsmith: ")
"""Another process' or library's own line."""
ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault)\b"
)
ECHOES = re.compile(
    r"ChildFailedError|See root cause above|Engine core initialization failed|EngineDeadError|"
    r"BrokenProcessPool|failed \(exitcode|RayTaskError|WorkerCrashedError|Connection closed by peer|"
    r"Connection reset by peer|Broken pipe|ProcessRaisedException|EngineCore encountered a|"
    r"Worker failed with error"
)


@dataclass(frozen=True)
class Cause:
    """Its kind, the line that says it, and what to do."""

    kind: str
    line: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.line} {self.remedy}".strip()


KINDS: tuple[tuple[str, str, str], ...] = (
    ("GPU memory",
     r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory|"
     r"larger than the available KV cache memory|No available memory for the cache blocks",
     "Use smaller rows (extract.tokens_per_batch, train.micro_batch_tokens), train.recompute: true, or "
     "free the GPU: nvidia-smi shows who holds it."),
    ("disk full", r"No space left on device|Disk quota exceeded|a full disk",
     "Free space, or point run and features.store at a larger disk; the same command goes on."),
    ("Ray cluster", r"Ray cluster at \S+ does not answer|Failed to connect to GCS",
     "`ray status` on its head; the same command goes on, on this cluster or another."),
    ("host memory or killed",
     r"Cannot allocate memory|\bMemoryError\b|oom[-_ ]?kill|Killed process|exit ?code:? ?-9\b|"
     r"Signal 9 \(SIGKILL\)|died without a word|\bdied \((?:signal|exit)",
     "The system killed it, most often for want of memory: dmesg says so. Use fewer workers, or a larger "
     "machine."),
    ("S3 credentials",
     r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|AccessDenied|access denied|403 Forbidden|"
     r"credentials were refused",
     "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the clock; `draftsmith doctor CONFIG` tries."),
    ("S3 or network",
     r"NoSuchBucket|answer from the object store|Error performing|EndpointConnectionError|"
     r"Could not resolve host|Name or service not known|"
     r"Temporary failure in name resolution|Connection refused|Max retries exceeded|timed? ?out.*http",
     "Check the network, AWS_ENDPOINT_URL and the bucket's name."),
    ("NCCL or rendezvous",
     r"\bgloo\b|NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|RendezvousConnectionError|"
     r"RendezvousTimeoutError|Watchdog caught collective|DistNetworkError|EADDRINUSE|"
     r"Address already in use",
     "A rank is gone, or cannot be reached, or its port is taken: look at its own log; NCCL_DEBUG=INFO "
     "names the interface."),
    ("driver or GPU",
     r"CUDA driver version is insufficient|no CUDA-capable device|device-side assert|"
     r"illegal memory access|uncorrectable ECC|Xid|GPU has fallen off",
     "nvidia-smi shows the GPU's state; after an ECC or Xid error take another machine."),
    ("kernel not built for this GPU",
     r"no kernel image is available|out of resource: shared memory|PTXAS|ptxas fatal|"
     r"Triton compilation failed|Triton .* produces incorrect results",
     "Update torch, Triton and fla-core for this GPU; `draftsmith doctor CONFIG` names what is used."),
    ("server refuses the architecture",
     r"Hybrid KV cache manager is disabled but failed to convert|"
     r"Failed to promote local KV cache specs to one unified type|CPU GDN attention requires BF16|"
     r"Model architectures .* are not supported|does not support hidden states",
     "This server, as it was started, cannot run hybrid targets: leave out --disable-hybrid-kv-cache-manager, "
     "serve in bf16, or take a version that can (`draftsmith doctor CONFIG` lists them)."),
    ("missing package", r"ModuleNotFoundError|ImportError|No module named|cannot import name",
     "Install it, or the extra that the message names."),
    ("not finite", r"NaN|\bnan\b|not finite|infinite|exploded|as high for",
     "Look at the samples that are named; lower train.lr."),
    ("checkpoint mismatch",
     r"size mismatch for|Missing key\(s\)|tensors missing|Unexpected key|weights_digest|"
     r"another input's work|made from other inputs",
     "Point at the weights or the run that this configuration is for."),
    ("bad data", r"\bsample \d+|:\d+: found|damaged|JSONDecodeError|UnicodeDecodeError",
     "Mend or leave out what is named (prepare.bad_lines: skip), and run the command again."),
    ("a port is taken", r"port \d+ is (?:already )?in use|EADDRINUSE", "Stop the other, or take another."),
    ("the run is locked", r"another draftsmith process at work", "Wait for it, or use another `run:`."),
)  # fmt: skip

FINAL = {"missing package", "kernel not built for this GPU", "server refuses the architecture", "not finite",
         "checkpoint mismatch", "bad data", "the run is locked", "S3 credentials", "disk full"}  # fmt: skip
"""What the same work on the same machine would meet again."""
TRANSIENT = {
    "Ray cluster",
    "S3 or network",
    "NCCL or rendezvous",
    "driver or GPU",
    "host memory or killed",
}
"""What may be gone in a while, even where it was told as a user's mistake."""


def first_cause(texts: Sequence[str]) -> Cause | None:
    """Of what processes said, in the order in which they failed: the first error, unless it is an
    echo of one that stands elsewhere. None when no error is there.
    """
    echo = None
    for text in texts:
        for line in errors(text):
            cause = classify(line)
            if not ECHOES.search(line):
                return cause
            echo = echo or cause
    return echo


def errors(text: str) -> list[str]:
    """The lines that say an error, the beginning of each chain first, in order."""
    raw = [line.rstrip() for line in text.splitlines()]
    lines = [PREFIX.sub("", line) for line in raw]
    prefixes = [whole[: len(whole) - len(line)] for whole, line in zip(raw, lines, strict=True)]
    found: list[str] = []
    for at, line in enumerate(lines):
        said = line.strip()
        if ERROR_LINE.match(said) or (_plain(said) and not _in_traceback(lines, at)):
            found.append(_whole(lines, prefixes, at))
    return found


def _plain(line: str) -> bool:
    """An error without a traceback: a command's one message, a kernel's or a shell's line."""
    return line.startswith(("draftsmith: ", "RuntimeError", "terminate called")) or bool(
        re.search(
            r"oom[-_ ]?kill|Killed process|Signal 9 \(SIGKILL\)|exitcode: -9|Failed to connect to GCS",
            line,
        )
    )


def _in_traceback(lines: list[str], at: int) -> bool:
    return any(TRACEBACK in line for line in lines[max(0, at - 2) : at])


def _whole(lines: list[str], prefixes: list[str], at: int) -> str:
    """An error's message may go on over some lines: to the next blank line or traceback, and not into
    what another process or logger says.
    """
    out = [lines[at].strip()]
    for line, prefix in list(zip(lines, prefixes, strict=True))[at + 1 : at + 6]:
        said = line.strip()
        if not said or TRACEBACK in said or said.startswith(CHAIN) or ERROR_LINE.match(said):
            break
        if prefix != prefixes[at] or LOGGED.match(line) or re.match("[-=]{8}", said):
            break
        out.append(said)
    return " ".join(out)[:600]


def classify(line: str) -> Cause:
    """The kind of an error by its words."""
    for kind, words, remedy in KINDS:
        if re.search(words, line):
            return Cause(kind, line, remedy)
    return Cause("unknown", line, "The log has the whole of it.")
