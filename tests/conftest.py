"""Shared fixtures; and GPU tests skip where there is no GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "e2e")]
torch.set_num_threads(1)  # the models are tiny: a second thread only costs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
