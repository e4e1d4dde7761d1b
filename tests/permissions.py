"""The command line in a process that file permissions bind, whoever runs the tests."""

import os
import subprocess
import sys
from pathlib import Path

# Linux lets root read and write every file by two capabilities, which a program that is started without them in its
# bounding set does not get: capabilities(7).
_BOUND = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
if os.geteuid() == 0:
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "htp_export", *sys.argv[1:]])
"""


def bound_by_permissions(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line in a folder.

    Args:
        folder: Where it runs.
        words: What follows ``htp-export``.
    """
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    program = [sys.executable, "-c", _BOUND, *words]
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
