"""Memory and use of this machine's GPUs, by NVIDIA's own library, without a CUDA context."""

import contextlib
import os
from typing import Any


def gpus() -> list[dict[str, Any]]:
    """index, name, used_bytes, total_bytes, use (0 to 1) of each GPU that this process may see; empty
    without a driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    out = []
    for index, handle in enumerate(_visible(pynvml)):
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


def _visible(pynvml: Any) -> list[Any]:
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
