"""On PYTHONPATH of a run that is to fail: training misbehaves once, as DRAFTSMITH_FAULT says:

KIND@STEP:FILE    the kind of fault, the step of the process, a file that exists once it happened
"""

import dataclasses
import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path


class Patch(importlib.abc.MetaPathFinder):
    """Wraps draftsmith.train.train_step as soon as that module is imported."""

    def find_spec(self, name, path, target=None):
        if name != "draftsmith.train":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.train_step = faulty(module.train_step)

        spec.loader.exec_module = exec_module
        return spec


def faulty(step):
    kind, _, rest = os.environ["DRAFTSMITH_FAULT"].partition("@")
    at, _, once = rest.partition(":")
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        done = step(*args, **kwargs)
        if calls != int(at) or Path(once).exists() or os.environ.get("RANK", "0") != "0":
            return done
        Path(once).touch()
        return FAULTS[kind](done)

    return wrapped


def raises(done):
    raise RuntimeError("the planted error")


def chained(done):
    try:
        raise OSError(5, "Input/output error", "/data/shard-7")
    except OSError as error:
        raise RuntimeError("the loader failed") from error


def gpu_memory(done):
    import torch

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 7.60 GiB. GPU 0 has a total capacity of 94.97 GiB of which "
        "3.10 GiB is free."
    )


def not_finite(done):
    return dataclasses.replace(done, loss=done.loss * float("nan"))


def hangs(done):
    while True:
        time.sleep(60)


def clock_jumps(done):
    real = time.time
    time.time = lambda: real() + 86400
    return done


def eats_memory(done):
    held = []
    while True:
        held.append(bytearray(b"x") * (64 << 20))


def ends(done):
    os._exit(7)


FAULTS = {
    function.__name__: function
    for function in (raises, chained, gpu_memory, not_finite, hangs, clock_jumps, eats_memory, ends)
}

if "DRAFTSMITH_FAULT" in os.environ:
    sys.meta_path.insert(0, Patch())
