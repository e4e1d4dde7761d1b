"""How large a model is once its functions stand in place of their calls, counted without putting them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from htp_export.errors import InputError

MOST_FLAT_NODES = 1_000_000
"""Ten times as many as commands are measured with (``docs/benchmarks.md``), which takes most of them half a minute."""

_MOST_SAID = 10**15  # 60 functions that call one another twice make more; no number of any length is computed


def check_flat_size(model: ir.Model) -> None:
    """Refuse a model whose flat graph has more than `MOST_FLAT_NODES` nodes because functions call one another.

    Dissolving functions, ONNX's shape inference and ONNX Runtime take time and memory for each node of that graph: of
    40 functions that call one another twice, 3 kB in a file, for 549,755,813,888. A model that is written with as many
    nodes is not refused.
    """
    if not model.functions:
        return
    size = flat_size(model)
    written = len(list(model.graph.all_nodes())) + sum(len(list(each.all_nodes())) for each in model.functions.values())
    if size > max(written, MOST_FLAT_NODES):
        count = f"{size:,}" if size < _MOST_SAID else f"more than {_MOST_SAID:,}"
        raise InputError(
            f"model {model.graph.name!r} has {count} nodes once its functions are inlined, as ONNX Runtime does; "
            f"at most {MOST_FLAT_NODES:,} are supported"
        )


def flat_size(model: ir.Model) -> int:
    """Count the nodes of the model without functions, up to 10^15; a call in a cycle of calls counts as one.

    Examples:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 20, "f" : 1]>
        ... g (float x) => (float y) { y = f.twice (x) }
        ... <domain: "f", opset_import: ["" : 20]> twice (a) => (c) { b = Relu (a) c = Relu (b) }''')
        >>> flat_size(ir.from_proto(model))
        2
    """
    contents = {key: _content(function.all_nodes(), model) for key, function in model.functions.items()}
    sizes: dict[ir.OperatorIdentifier, int] = {}

    def total(plain: int, calls: Counter[ir.OperatorIdentifier]) -> int:
        inside = sum(count * sizes.get(callee, 1) for callee, count in calls.items())
        return min(plain + inside, _MOST_SAID)

    opened: set[ir.OperatorIdentifier] = set()
    waiting = list(contents)
    while waiting:
        key = waiting[-1]
        if key not in opened:
            opened.add(key)
            waiting += [callee for callee in contents[key][1] if callee not in opened]
            continue
        waiting.pop()
        if key not in sizes:
            sizes[key] = total(*contents[key])
    return total(*_content(model.graph.all_nodes(), model))


def _content(nodes: Iterable[ir.Node], model: ir.Model) -> tuple[int, Counter[ir.OperatorIdentifier]]:
    """How many nodes call no function of the model, and which functions the others call."""
    calls: Counter[ir.OperatorIdentifier] = Counter()
    plain = 0
    for node in nodes:
        if node.op_identifier() in model.functions:
            calls[node.op_identifier()] += 1
        else:
            plain += 1
    return plain, calls
