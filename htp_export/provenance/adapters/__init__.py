"""Adapters that run other tools and restore the module tags of their results.

Each adapter takes a tagged model and the options of the tool, and returns a `Carried`, with the new model as
``.model``. The library of a tool is imported when the tool runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from htp_export.provenance.adapters.converters import float16, symbolic_shape_infer, version_converter
    from htp_export.provenance.adapters.optimizers import onnxoptimizer, onnxscript, onnxsim, onnxslim
    from htp_export.provenance.adapters.quantizers import matmul_nbits, quantize_dynamic, quantize_static
    from htp_export.provenance.adapters.runtime import onnxruntime, onnxruntime_transformers

__all__ = [
    "float16",
    "matmul_nbits",
    "onnxoptimizer",
    "onnxruntime",
    "onnxruntime_transformers",
    "onnxscript",
    "onnxsim",
    "onnxslim",
    "quantize_dynamic",
    "quantize_static",
    "symbolic_shape_infer",
    "version_converter",
]

_HOMES = {
    "float16": "converters",
    "matmul_nbits": "quantizers",
    "onnxoptimizer": "optimizers",
    "onnxruntime": "runtime",
    "onnxruntime_transformers": "runtime",
    "onnxscript": "optimizers",
    "onnxsim": "optimizers",
    "onnxslim": "optimizers",
    "quantize_dynamic": "quantizers",
    "quantize_static": "quantizers",
    "symbolic_shape_infer": "converters",
    "version_converter": "converters",
}


def __getattr__(name: str) -> Any:
    """Import an adapter when it is first used: the names of the tools are needed to show help, onnx is not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
