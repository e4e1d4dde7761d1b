"""The model between the steps: what its operators are, and which of its values depend on its inputs."""

from htp_export.process.lazy_sympy import import_onnx_ir

import_onnx_ir()
