"""The opset of a model raised for operators that are put into it; tags, names and contents stay."""

from __future__ import annotations

from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel

_FIRST = 18
"""Before it, axes are attributes in some versions and inputs in others; torch exports no earlier ones with dynamo."""

_IR_VERSION = 10
"""The first one with the integers of 4 bits."""

_OTHER_MEANING = {"DFT": 20, "GridSample": 20, "GroupNormalization": 21}
"""Operators → the opset from which on their inputs or attributes mean something else. All others of these versions take
more types or have more attributes (https://github.com/onnx/onnx/blob/main/docs/Changelog.md)."""


def raised(tagged: TaggedModel, opset: int) -> TaggedModel:
    """A model whose operators are those of an opset or of a later one; the same if they are, or cannot be converted.

    Raises:
        InputError: If an operator of the model means something else in that opset.
    """
    before = tagged.model.graph.opset_imports.get("", 1)
    if not _FIRST <= before < opset:
        return tagged
    copy = tagged.clone()
    for node in copy.model.graph.all_nodes():
        if not node.domain and before < _OTHER_MEANING.get(node.op_type, 0) <= opset:
            raise InputError(
                f"{node.op_type} {node.name!r} means something else from opset {opset} on, and the model has {before}: "
                f"export it with opset_version={opset}"
            )
        if not node.domain and node.version is not None:
            node.version = opset
    copy.model.graph.opset_imports[""] = opset
    copy.model.ir_version = max(copy.model.ir_version, _IR_VERSION)
    return copy
