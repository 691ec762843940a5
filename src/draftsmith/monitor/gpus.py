"""Memory and use of this machine's GPUs, by NVIDIA's own library, without a CUDA context."""

import contextlib
import functools
import os
from typing import Any

import pynvml


def gpus() -> list[dict[str, Any]]:
    """index, name, used_bytes, total_bytes, use (0 to 1) of each GPU that this process may see; empty
    without a driver.
    """
    out = []
    for index, handle in enumerate(_visible()):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        use = None
        with contextlib.suppress(pynvml.NVMLError):  # MIG slices have none
            use = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        out.append(
            {
                "index": index,
                "name": pynvml.nvmlDeviceGetName(handle),
                "used_bytes": int(memory.used),
                "total_bytes": int(memory.total),
                "use": use,
            }
        )
    return out


@functools.cache
def _visible() -> list[Any]:
    """Their handles. To look for a driver that is not there takes as long as all else together."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    found = []
    for name in filter(None, (word.strip() for word in asked.split(","))):
        with contextlib.suppress(pynvml.NVMLError):
            found.append(
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
    return found
