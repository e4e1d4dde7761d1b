"""The words of ``htp.reason``: how the owners of a node are known. Each is defined in ``docs/format.md``."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """How the owners of a node are known."""

    # from the capture of an export
    SCOPE = "scope"
    SHARED = "shared"
    FUSED = "fused"
    FLOW = "flow"
    PARAMETERS = "parameters"
    # from what was done to the model
    FUNCTION = "function"
    SPLICED = "spliced"
    # from `carry`
    TENSOR = "tensor"
    NODE = "node"
    INITIALIZER = "initializer"
    VALUES = "values"
    REGION = "region"
    INSERTED = "inserted"
    UNKNOWN = "unknown"
