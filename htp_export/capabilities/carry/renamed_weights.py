"""Weights that a tool renamed: the same numbers under another name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.carry.graph_summary import GraphSummary
from htp_export.errors import FileError
from htp_export.model.content_hash import array_hash

__all__ = ["renamed_weights"]


def renamed_weights(before: tuple[ir.Model, GraphSummary], after: tuple[ir.Model, GraphSummary]) -> dict[int, int]:
    """Weight after a tool → original weight with the same contents, where neither model has one of the other's name.

    Small constants are compared by their contents already. Weights are read only where both models have some of the
    same type and shape that the other does not know by name; one whose data file is gone has no counterpart.

    Args:
        before: The original model and its summary.
        after: The result of the tool, and its summary.
    """
    originals, results = _unknown(before, after), _unknown(after, before)
    found: dict[int, int] = {}
    for kind, weights in results.items():
        if kind not in originals:
            continue
        by_content = _by_content(before, originals[kind])
        for content, copies in _by_content(after, weights).items():
            found |= dict.fromkeys(copies, by_content[content][0]) if content in by_content else {}
    return found


def _unknown(own: tuple[ir.Model, GraphSummary], other: tuple[ir.Model, GraphSummary]) -> dict[Hashable, list[int]]:
    """Type and shape → the large weights of the main graph that the other model does not have by name."""
    (model, summary), (_, others) = own, other
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, value in enumerate(summary.values):
        is_large = value.kind == "initializer" and not value.content and not value.scope
        if is_large and value.name not in others.by_name and value.name in model.graph.initializers:
            found[value.dtype, value.shape].append(index)
    return found


def _by_content(own: tuple[ir.Model, GraphSummary], weights: Iterable[int]) -> dict[bytes, list[int]]:
    model, summary = own
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for index in weights:
        tensor = model.graph.initializers[summary.values[index].name].const_value
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        try:
            found[array_hash(np.asarray(tensor.numpy()))].append(index)
        except (FileError, OSError):
            continue
    return found
