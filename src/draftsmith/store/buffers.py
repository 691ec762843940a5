"""Memory for what is read, used again and again: to touch fresh pages costs more than to read a disk
(measured: half of the reading time).
"""

import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Lease(np.ndarray):
    """A use of a piece of memory. Tensors and their views keep it alive."""


class Buffers:
    """Tensors in pieces of `num_bytes`, page-locked for a GPU when `pinned`. A piece comes back by
    itself once no tensor shows it any more; at most `keep` wait for their next use.
    """

    def __init__(self, num_bytes: int, *, keep: int, pinned: bool) -> None:
        self.num_bytes, self.keep, self.pinned = num_bytes, keep, pinned
        self._free: deque[tuple[np.ndarray, list[Any]]] = deque()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, list[Any]]:
        """A tensor of any content, and a list for CUDA events: the memory is not given out again
        before they have happened.
        """
        size = prod(shape) * dtype.itemsize
        assert size <= self.num_bytes, f"{size} bytes in a piece of {self.num_bytes}"
        try:
            memory, events = self._free.pop()
        except IndexError:
            fresh = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            memory, events = fresh.numpy(), []
        for event in events:
            event.synchronize()
        lease, events = memory.view(_Lease), []
        weakref.finalize(lease, self._back, memory, events).atexit = False
        return torch.from_numpy(lease)[:size].view(dtype).reshape(*shape), events

    def _back(self, memory: np.ndarray, events: list[Any]) -> None:
        if len(self._free) < self.keep:
            self._free.append((memory, events))
