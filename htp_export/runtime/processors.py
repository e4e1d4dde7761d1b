"""Properties of this processor that decide how ONNX Runtime multiplies 8-bit integers."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def is_arm() -> bool:
    """Return whether it is an ARM processor."""
    return platform.machine().lower().startswith(("arm", "aarch"))


def saturates() -> bool:
    """Return whether it is an x86 processor without VNNI; False if unknown, on other systems than Linux.

    There, sums of two products of 8-bit integers can exceed 16 bits, and saturate.
    """
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            return "avx2" in flags and not flags & {"avx512_vnni", "avx_vnni"}
    return False
