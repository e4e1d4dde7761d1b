"""The lines of Python that a node was captured at, as torch's dynamo exporter writes them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import onnx_ir as ir

_STACK_TRACE = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in ([^\n]*)(?:\n *([^\n]*))?')


class SourceLine(NamedTuple):
    """One line of the stack; its code is ``""`` if the file was not there when the model was exported."""

    file: str
    line: int
    function: str
    code: str


def source_lines(node: ir.Node) -> tuple[SourceLine, ...]:
    """The stack that a node was captured at, the innermost line last; empty if the file does not say it.

    Examples:
        >>> trace = 'File "net.py", line 7, in forward'
        >>> source_lines(ir.node("Relu", [ir.val("x")], metadata_props={"pkg.torch.onnx.stack_trace": trace}))
        (SourceLine(file='net.py', line=7, function='forward', code=''),)
    """
    return _lines(node.metadata_props.get(_STACK_TRACE, ""))


@lru_cache(maxsize=65536)
def _lines(trace: str) -> tuple[SourceLine, ...]:
    return tuple(
        SourceLine(file, int(line), function, code.strip()) for file, line, function, code in _FRAME.findall(trace)
    )
