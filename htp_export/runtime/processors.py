"""What ONNX Runtime finds in this processor for products of 8-bit integers."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def is_arm() -> bool:
    """Whether it is an ARM processor."""
    return platform.machine().lower().startswith(("arm", "aarch"))


def saturates() -> bool:
    """Whether it is an x86 processor without VNNI; not known, and so False, where Linux does not say."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")),
        set[str](),
    )
    return "avx2" in flags and not flags & {"avx512_vnni", "avx_vnni"}
