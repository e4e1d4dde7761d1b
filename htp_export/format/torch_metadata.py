"""What torch itself writes into ONNX files: the module scopes of nodes, and the lines of Python that they are from.

The scopes are for files without tags. They are not exact (see ``docs/owners.md``); a warning says
so when they are used. The dynamo exporter writes them as node metadata, the TorchScript exporter
into node names.
"""

from __future__ import annotations

import ast
import itertools
import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir

if TYPE_CHECKING:
    import onnx_ir as ir


# in the name of a node: those of modules, which Python itself does not nest deeper
_MOST_SCOPES = 1_000
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_CALL_SUFFIX = re.compile(r"@\d+(?=\.|$)")


def scopes_of(node: ir.Node) -> tuple[tuple[str, str], ...]:
    """Return the modules that were running according to torch's scopes of a node, outermost first; empty if none.

    Each is (module path, class); the class is ``""`` if torch does not write it.

    Examples:
        >>> import onnx_ir as ir
        >>> scopes_of(ir.Node("", "MatMul", [], name="/encoder/layer.0/query/MatMul"))
        (('', ''), ('encoder', ''), ('encoder.layer.0', ''), ('encoder.layer.0.query', ''))
        >>> scopes = {"pkg.torch.onnx.name_scopes": "['', 'fc@1', 'linear_1']"}
        >>> scopes_of(ir.Node("", "Gemm", [], metadata_props=scopes))
        (('', ''), ('fc', ''))
    """
    if _SCOPES in node.metadata_props:
        # The last entry is the FX node, not a module.
        paths = [_CALL_SUFFIX.sub("", path) for path in _strings(node.metadata_props[_SCOPES])[:-1]]
        classes = _strings(node.metadata_props.get(_CLASSES, "[]"))[:-1]
        return tuple(
            zip(
                paths, classes if len(classes) == len(paths) else itertools.repeat(""), strict=False
            )
        )
    if node.name and node.name.startswith("/"):
        parts = node.name.split("/", maxsplit=_MOST_SCOPES)[1:-1]
        return (("", ""), *((path, "") for path in itertools.accumulate(parts, "{}.{}".format)))
    return ()


@lru_cache(maxsize=4096)
def _strings(literal: str) -> tuple[str, ...]:
    """Parse a Python list of strings as torch writes it; empty if it is invalid, because files are not trusted."""
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()
    return (
        tuple(value)
        if isinstance(value, list) and all(isinstance(item, str) for item in value)
        else ()
    )


_STACK_TRACE = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "([^"\n]*)", line ([0-9]{1,9}), in ([^\n]*)(?:\n *([^\n]*))?')


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
        SourceLine(file, int(line), function, code.strip())
        for file, line, function, code in _FRAME.findall(trace)
    )
