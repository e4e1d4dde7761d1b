"""Large weights that are equal: passes do not read weights to compare them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.content_hash import array_hash
from htp_export.model.graph_facts import GraphFacts
from htp_export.shapes.facts import constant_tensor

__all__ = ["large_duplicates"]

_COMPARED = 1024
"""Elements; `eliminate_duplicate_constants` compares tensors up to this size."""

_HASHED = 1 << 20  # bytes; of what is larger, a sample is compared first
_SAMPLE = 1024  # elements

_Duplicates: TypeAlias = tuple[tuple[str, ...], tuple[ir.Node, ...], str, str]


def large_duplicates(facts: GraphFacts) -> Iterator[_Duplicates]:
    """Equal tensors that no pass merges: their names, the nodes that read them, what they cost, and why they stay."""
    groups: defaultdict[Hashable, list[ir.Value]] = defaultdict(list)
    for value, tensor in _constants(facts):
        if tensor.size > _COMPARED:
            groups[(tensor.dtype, tuple(tensor.shape.numpy()))].append(value)
    for alike in groups.values():
        for equal in _equal(alike) if len(alike) > 1 else ():
            readers = tuple(dict.fromkeys(use.node for value in equal for use in value.uses()))
            held = _held(equal[0])
            size = 0 if held is None else held.nbytes * (len(equal) - 1)
            why = f"more than {_COMPARED:,} elements: passes do not read weights to compare them"
            names = tuple(value.name or "" for value in equal)
            yield names, readers, f"{len(equal)} equal, {size:,} bytes too many", why


def _constants(facts: GraphFacts) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The values of the main graph that hold a tensor."""
    graph = facts.tagged.model.graph
    made = (node.outputs[0] for node in facts.nodes_of("Constant") if node.graph is graph)
    for value in (*graph.initializers.values(), *made):
        tensor = _held(value)
        if tensor is not None and tensor.dtype != ir.DataType.STRING and not value.is_graph_input():
            yield value, tensor


def _held(value: ir.Value) -> ir.TensorProtocol | None:
    return value.const_value if value.const_value is not None else constant_tensor(value)


def _equal(values: list[ir.Value]) -> Iterator[list[ir.Value]]:
    """The groups of equal tensors among some of one type and shape; as little is read as can be."""
    for key in (_sample, _whole):
        found: defaultdict[Hashable, list[ir.Value]] = defaultdict(list)
        for value in values:
            tensor = _held(value)
            said = None if tensor is None else key(tensor)
            if said is not None:
                found[said].append(value)
        if key is _whole:
            yield from (group for group in found.values() if len(group) > 1)
        values = [value for group in found.values() if len(group) > 1 for value in group]


def _sample(tensor: ir.TensorProtocol) -> Hashable | None:
    """The first elements of a large tensor; nothing of a small one, which is read whole at once."""
    if tensor.nbytes <= _HASHED:
        return ()
    try:
        return np.asarray(tensor.numpy()).reshape(-1)[:_SAMPLE].tobytes()
    except (OSError, FileError):  # the file of its external data is not there: nothing can be said
        return None


def _whole(tensor: ir.TensorProtocol) -> Hashable | None:
    try:
        return array_hash(np.asarray(tensor.numpy()))
    except (OSError, FileError):
        return None
