"""Metadata that torch writes into ONNX files: the module scopes of nodes, and the Python lines that created them.

Scopes are used for files without tags. They are not exact (see ``docs/owners.md``), and their use
is logged as a warning. The dynamo exporter writes them as node metadata, the TorchScript exporter
as a part of node names.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import MutableMapping
from functools import lru_cache
from typing import NamedTuple

import onnx_ir as ir

from htp_export.format import tags

_MOST_SCOPES = 1_000  # in the name of a node: Python's recursion limit bounds the depth of modules
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_CALL_SUFFIX = re.compile(r"@\d+(?=\.|$)")


def scopes_of(node: ir.Node) -> tuple[tuple[str, str], ...]:
    """Return the running modules in torch's scopes of a node, outermost first; empty without scopes.

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
        # the last entry is the FX node, not a module
        paths = [_CALL_SUFFIX.sub("", path) for path in _strings(node.metadata_props[_SCOPES])[:-1]]
        classes = _strings(node.metadata_props.get(_CLASSES, "[]"))[:-1]
        if len(classes) != len(paths):
            classes = ("",) * len(paths)
        return tuple(zip(paths, classes, strict=True))
    if node.name and node.name.startswith("/"):
        parts = node.name.split("/", maxsplit=_MOST_SCOPES)[1:-1]
        return (("", ""), *((path, "") for path in itertools.accumulate(parts, "{}.{}".format)))
    return ()


@lru_cache(maxsize=4096)
def _strings(literal: str) -> tuple[str, ...]:
    """Parse a Python list of strings, as torch writes it, from an untrusted file; empty if it is invalid."""
    try:
        strings = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()
    if isinstance(strings, list) and all(isinstance(item, str) for item in strings):
        return tuple(strings)
    return ()


_STACK_TRACE = "pkg.torch.onnx.stack_trace"
# the code of a frame is left out if its file was not available
_FRAME = re.compile(
    r'File "([^"\n]*)", line ([0-9]{1,9}), in ([^\n]*)(?:\n *(?! |File ")([^\n]*))?'
)


class SourceLine(NamedTuple):
    """One line of the stack; its code is ``""`` if its file was not available when the model was exported."""

    file: str
    line: int
    function: str
    code: str


def source_lines(node: ir.Node) -> tuple[SourceLine, ...]:
    """Return the Python stack when a node was captured, the innermost line last; empty if it is not in the file.

    The TorchScript exporter writes none.

    Examples:
        >>> trace = 'File "net.py", line 7, in forward'
        >>> source_lines(ir.node("Relu", [ir.val("x")], metadata_props={"pkg.torch.onnx.stack_trace": trace}))
        (SourceLine(file='net.py', line=7, function='forward', code=''),)
    """
    return _lines(node.metadata_props.get(_STACK_TRACE, ""))


def source_of(node: ir.Node) -> SourceLine | None:
    r"""The line of the model's code that created a node; None if it is not in the file.

    An export by htp_export records the innermost line outside of torch (``htp.source``) unless it is
    the innermost one of the stack.

    Examples:
        >>> trace = 'File "net.py", line 7, in forward\n  y = self.fc(x)\nFile "linear.py", line 134, in forward'
        >>> node = ir.node("Gemm", [ir.val("x")], metadata_props={"pkg.torch.onnx.stack_trace": trace})
        >>> source_of(node).file
        'linear.py'
        >>> node.metadata_props["htp.source"] = traced_line(source_lines(node)[0])
        >>> source_of(node)
        SourceLine(file='net.py', line=7, function='forward', code='y = self.fc(x)')
    """
    recorded = _lines(node.metadata_props.get(tags.SOURCE, ""))
    lines = recorded or source_lines(node)
    return lines[-1] if lines else None


def write_source(metadata: MutableMapping[str, str], line: SourceLine | None) -> None:
    """Replace the recorded line of a node; None removes it."""
    metadata.pop(tags.SOURCE, None)
    if line is not None:
        metadata[tags.SOURCE] = traced_line(line)


def traced_line(line: SourceLine) -> str:
    """A line as in Python's tracebacks, which is how torch writes it, too."""
    text = f'File "{line.file}", line {line.line}, in {line.function}'
    return f"{text}\n    {line.code}" if line.code else text


@lru_cache(maxsize=65536)
def _lines(trace: str) -> tuple[SourceLine, ...]:
    return tuple(
        SourceLine(file, int(line), function, code.strip())
        for file, line, function, code in _FRAME.findall(trace)
    )
