"""ONNX files that keep the module hierarchy of the PyTorch model they came from.

Example:
    >>> import torch, htp_export
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
    >>> {path: [node.op_type for node in tagged[path].nodes] for path in tagged.paths}
    {'': ['Gemm', 'Relu'], '0': ['Gemm'], '1': ['Relu']}
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from htp_export.analyze.borders import Contamination, contamination
    from htp_export.errors import HtpExportError, InputError
    from htp_export.exporter import export, tagging
    from htp_export.hierarchy import Hierarchy, ModuleInfo
    from htp_export.tagged import Region, TaggedModel, load

__all__ = [
    "Contamination",
    "Hierarchy",
    "HtpExportError",
    "InputError",
    "ModuleInfo",
    "Region",
    "TaggedModel",
    "contamination",
    "export",
    "load",
    "tagging",
]

__version__ = "0.1.0"

_HOMES = {
    "Hierarchy": "hierarchy",
    "HtpExportError": "errors",
    "InputError": "errors",
    "ModuleInfo": "hierarchy",
    "Region": "tagged",
    "TaggedModel": "tagged",
    "Contamination": "analyze.borders",
    "contamination": "analyze.borders",
    "export": "exporter",
    "load": "tagged",
    "tagging": "exporter",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and reading a file does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
