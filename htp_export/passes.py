"""The passes of `optimize`: those that there are, and a place for others.

Passes of your own are registered with `register`, or come from packages with entry points of the group
``htp_export.passes``.
"""

from htp_export.capabilities.optimize.registry import LEVELS, PassInfo, available, register
from htp_export.capabilities.optimize.results import OptimizedModels

__all__ = ["LEVELS", "OptimizedModels", "PassInfo", "available", "register"]
