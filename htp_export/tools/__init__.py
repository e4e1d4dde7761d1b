"""Other people's tools, run so that the module tags come through.

Each takes a tagged model (a file, `TaggedModel`, ``ModelProto``, ``ir.Model``) and the tool's own options, and returns
what `htp_export.carry` returns: the result with the new model as ``.model``. A tool's library is imported when the
tool runs.
"""

from __future__ import annotations

from htp_export.tools.converters import float16, symbolic_shape_infer, version_converter
from htp_export.tools.optimizers import onnxoptimizer, onnxscript, onnxsim, onnxslim
from htp_export.tools.quantizers import matmul_nbits, quantize_dynamic, quantize_static
from htp_export.tools.runtime import onnxruntime, onnxruntime_transformers

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
