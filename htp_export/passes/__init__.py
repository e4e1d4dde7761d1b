"""Graph passes that keep the module tags: each an onnx_ir pass, with one merge policy and one pipeline around them.

Passes of your own are registered with `register`, or come from packages with entry points of the group
``htp_export.passes``.
"""

from htp_export.passes.registry import LEVELS, PassInfo, available, register
from htp_export.passes.results import OptimizedModels

__all__ = ["LEVELS", "OptimizedModels", "PassInfo", "available", "register"]
