"""Peak resident memory of a process, without what its parent held.

Linux counts into ``ru_maxrss`` of a started process the peak of the process that started it: a test that has once
held 3 GB would see 3 GB for ``true``. Linux's ``VmHWM`` begins anew with each program.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

STATUS = Path("/proc/self/status")
# A process of its own, which holds next to nothing, starts the command and asks what its children took.
_LAUNCHER = """
import json, resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
print(json.dumps([status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def status(field: str) -> int:
    """Return the bytes of a field of ``/proc/self/status``."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def own_peak() -> int:
    """Return the bytes that this process held at most."""
    if STATUS.is_file():
        return status("VmHWM")
    return _bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def peak_of(command: Sequence[str]) -> int:
    """Run a command, whose output goes to stderr, and return the bytes that it held at most.

    Raises:
        SystemExit: The command failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCHER, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    status, peak = json.loads(done.stdout)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return _bytes(peak)


class PeakOfOwn:
    """The most memory that the process itself held, pages of mapped files aside, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.own = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakOfOwn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.own = max(self.own, status("RssAnon"))


def _bytes(maximum: int) -> int:
    return maximum * (1 if sys.platform == "darwin" else 1024)
