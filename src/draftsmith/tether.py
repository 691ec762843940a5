"""A command that ends when the process that started it does, however that ended:

    python -m draftsmith.tether PARENT_PID SECONDS COMMAND ...

SECONDS: what it has between SIGTERM and SIGKILL. Servers and torchrun run under it: killed with -9, a run leaves no
process behind that holds a GPU.
"""

import os
import subprocess
import sys

from draftsmith.core import Stopped
from draftsmith.monitor.processes import adopt_orphans, descendants, end
from draftsmith.signals import sigterm_unwinds

LOOK_S = 0.5
END_S = 30.0  # a server of a large model takes its time


def tethered(command: list[str], wait_s: float = END_S) -> list[str]:
    """The command, tied to this process."""
    return [sys.executable, "-m", "draftsmith.tether", str(os.getpid()), str(wait_s), *command]


def main() -> int:
    """Run the command until it ends, SIGTERM comes or the parent is gone; the command's exit code."""
    parent, wait_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    adopt_orphans()
    code, child = 143, None
    try:
        with sigterm_unwinds():
            child = subprocess.Popen(command)
            while os.getppid() == parent:
                try:
                    code = child.wait(LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
    except (Stopped, KeyboardInterrupt):
        pass
    if child is not None and child.poll() is None:
        end([child.pid], wait_s=wait_s)  # torchrun hands it on: its ranks are told once
    end(descendants(os.getpid()), wait_s=wait_s)
    if code < 0:  # who started this sees the same end
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
