"""``torch.onnx.export`` with module tags: the capture of an export, and the owners of nodes."""

from htp_export.process.lazy_sympy import import_onnx_ir

import_onnx_ir()
