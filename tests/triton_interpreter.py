"""Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def interpreted(code: str) -> subprocess.CompletedProcess[str]:
    """Run this code, which may import tests by name."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE / "unit"), env.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
