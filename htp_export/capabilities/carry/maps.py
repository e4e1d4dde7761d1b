"""A summary as a short text for the metadata of a file, ``htp.map``: it replaces the original file for ``carry``."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, SummaryNode, SummaryValue
from htp_export.format import tags

_LARGEST = 1 << 28  # bytes of JSON; a text that unfolds to more is no map

T = TypeVar("T", bound=Hashable)


def map_to_text(summary: GraphSummary) -> str:
    """A summary as JSON, deflated, in base 85: with the shapes that can be inferred, and no reasons.

    Examples:
        >>> relu = SummaryNode("Relu", "node", (0,), (1,), owners=("act",))
        >>> summary = GraphSummary([relu], [SummaryValue("x", kind="input"), SummaryValue("y")], [0], [1])
        >>> text_to_map(map_to_text(summary)) == summary
        True
    """
    nodes, values = summary.nodes, summary.values
    for index in range(len(values)):
        summary.shape(index)  # a reader of the map has no graph for inference
    columns = {
        "nodes": [
            _table(node.op for node in nodes),
            [node.name for node in nodes],
            [_relative(node.inputs, index) for index, node in enumerate(nodes)],
            [_relative(node.outputs, index) for index, node in enumerate(nodes)],
            _table(node.captured for node in nodes),
            _table(node.attributes for node in nodes),
            _table(node.words for node in nodes),
            _table(node.scope for node in nodes),
            _table((node.holder, node.has_bodies) for node in nodes),
            _table((node.owners, node.call) for node in nodes),
        ],
        "values": [
            [value.name for value in values],
            _table((value.scope, value.shape, value.dtype, value.kind) for value in values),
            _table(value.content for value in values),
        ],
        "inputs": summary.inputs,
        "outputs": summary.outputs,
    }
    plain = json.dumps(columns, separators=(",", ":"), ensure_ascii=False).encode()
    return base64.b85encode(zlib.compress(plain, 9)).decode()


def text_to_map(text: str) -> GraphSummary:
    """What `map_to_text` wrote; a ValueError if the text is none."""
    try:
        unfolding = zlib.decompressobj()
        plain = unfolding.decompress(base64.b85decode(text), _LARGEST)
        if unfolding.unconsumed_tail:
            raise ValueError("it is too large")
        return _summary(json.loads(plain))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, zlib.error, binascii.Error) as error:
        raise ValueError(f"{tags.MAP} is not what the file format says: {error}") from error


def _summary(columns: dict[str, Any]) -> GraphSummary:
    op, names, inputs, outputs, captured, attributes, words, scopes, held, owned = columns["nodes"]
    value_names, kinds, contents = columns["values"]
    values = [
        SummaryValue(_text(name), scope, None if shape is None else tuple(shape), dtype, kind, _text(content))
        for name, (scope, shape, dtype, kind), content in zip(
            value_names, _listed(kinds), _listed(contents), strict=True
        )
    ]
    rows = zip(
        *(_listed(op), names, inputs, outputs, _listed(captured), _listed(attributes)),
        *(_listed(words), _listed(scopes), _listed(held), _listed(owned)),
        strict=True,
    )
    nodes = [_node(index, row, len(values)) for index, row in enumerate(rows)]
    graph_inputs, graph_outputs = (list(_within(columns[key], len(values))) for key in ("inputs", "outputs"))
    return GraphSummary(nodes, values, graph_inputs, graph_outputs)


def _node(index: int, row: tuple[Any, ...], count: int) -> SummaryNode:
    op, name, inputs, outputs, captured, attributes, words, scope, (holder, has_bodies), (owners, call) = row
    return SummaryNode(
        *(_text(op), _text(name), _absolute(inputs, index, count), _absolute(outputs, index, count)),
        *(_within(captured, count), _text(attributes), tuple(map(_text, words)), _text(scope)),
        holder=holder if NOTHING <= holder < index else NOTHING,
        has_bodies=bool(has_bodies),
        owners=tuple(map(_text, owners)),
        call=_text(call),
    )


def _table(column: Iterable[T]) -> list[Any]:
    """Entries, each once, and for each row the number of its entry."""
    entries: dict[T, int] = {}
    rows = [entries.setdefault(entry, len(entries)) for entry in column]
    return [list(entries), rows]


def _listed(table: Sequence[Any]) -> list[Any]:
    entries, rows = table
    return [entries[row] for row in rows]


def _relative(places: Sequence[int], index: int) -> list[int | None]:
    """Values by their distance from the node's own number: alike in layers that are alike."""
    return [None if place == NOTHING else place - index for place in places]


def _absolute(places: Sequence[int | None], index: int, count: int) -> tuple[int, ...]:
    return _within([NOTHING if place is None else place + index for place in places], count)


def _within(places: Sequence[int], count: int) -> tuple[int, ...]:
    if not all(isinstance(place, int) and NOTHING <= place < count for place in places):
        raise ValueError("a value has a number that no value has")
    return tuple(places)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not a string")
    return value
