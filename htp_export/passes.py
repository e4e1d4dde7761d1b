"""The passes of `optimize`: those that there are, and a place for others.

Passes of your own are registered with `register`, or come from packages with entry points of the
group ``htp_export.passes``. Those that rewrite node by node derive from `NodePass`.
"""

from htp_export.capabilities.optimize.registry import (
    LEVELS,
    NodePass,
    PassInfo,
    available,
    register,
)
from htp_export.capabilities.optimize.results import OptimizedModels
from htp_export.editing.editing import replace

__all__ = ["LEVELS", "NodePass", "OptimizedModels", "PassInfo", "available", "register", "replace"]
