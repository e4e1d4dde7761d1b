"""ONNX Runtime's quantizers: imported when they are needed, kept from printing and from configuring logging."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir

from htp_export.editing.submodels import constant_of
from htp_export.errors import HtpExportError, ToolError, described
from htp_export.files.filesystem import temporary_folder
from htp_export.process.progress import counted
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array

GROUP_BYTES = 32 << 20
"""Weights that are in memory at a time; a single one may be larger."""

_MOST_GROUPS = 256
"""Each group leaves an open file: systems allow 1024, or fewer, for a process. Groups of huge models are larger."""

_PACKAGE = "onnxruntime"
_QUANTIZATION = f"{_PACKAGE}.quantization"

_MOST_FAULTY = 32
"""Failures after which a kind counts: the node of each is found alone, by about ten attempts."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def quantizers(module: str = "") -> Any:
    """Import ``onnxruntime.quantization``, or a module of it.

    Some of its modules call ``logging.basicConfig`` on import, which would configure the logging of
    the program.
    """
    with quietly():
        return importlib.import_module(f"{_QUANTIZATION}.{module}" if module else _QUANTIZATION)


def quietly() -> contextlib.AbstractContextManager[None]:
    """Suppress what ONNX Runtime's quantizers say.

    It is advice that the caller cannot follow, such as to preprocess the model. They log to the
    root logger itself.
    """
    return quiet("")


class PartError(Exception):
    """ONNX Runtime's quantizer failed on a part; the message has the names of the whole model."""


def raised_by_tool(error: Exception) -> bool:
    """Whether an error comes from ONNX Runtime, or from code that it called."""
    return any(
        _PACKAGE in Path(frame.filename).parts
        for frame in traceback.extract_tb(error.__traceback__)
    )


def tool_error(name: str, error: Exception, where: str = "") -> ToolError:
    """The error of a quantizer that failed on the model of this name; ``where``: on which node."""
    problem = str(error) if isinstance(error, PartError) else described(error)
    return ToolError(_QUANTIZATION, f"failed on {name}: {problem}{where}")


@contextlib.contextmanager
def tool_failures(told: Callable[[str], str]) -> Iterator[None]:
    """Turn errors that ONNX Runtime raises into a `PartError`; ``told`` puts the user's names into its message."""
    try:
        yield
    except HtpExportError:
        raise
    except Exception as error:
        if not raised_by_tool(error):
            raise
        raise PartError(told(described(error))) from error


def without_faulty(
    items: Sequence[Item],
    attempt: Callable[[Sequence[Item]], Result],
    kinds: Callable[[Item], Sequence[str]],
) -> tuple[Result | None, dict[Item, PartError]]:
    """The result of an attempt without the nodes on which it fails, and the failure of each of these.

    The nodes are added by halves to those that are known to do. The result is None if none does.
    After many failures, nodes that are alike one that failed are left out without an attempt;
    ``kinds`` says of each node what it is alike, the narrowest kind first, of which one more counts
    after as many failures again.

    Examples:
        >>> def attempt(numbers):
        ...     if 3 in numbers:
        ...         raise PartError("3 is odd")
        ...     return sum(numbers)
        >>> without_faulty([1, 2, 3, 4], attempt, lambda number: [str(number)])
        (7, {3: PartError('3 is odd')})
    """
    done: list[Item] = []
    result: Result | None = None
    faulty: dict[Item, PartError] = {}
    failed: dict[str, PartError] = {}  # a kind that counts → the first failure of it
    untried: dict[Item, PartError] = {}
    waiting = [list(items)]
    while waiting:
        some = []
        for item in waiting.pop():
            kind = next((kind for kind in kinds(item) if kind in failed), None)
            if kind is None:
                some.append(item)
            else:
                untried[item] = PartError(
                    f"not tried after failures, one of which on a similar {kind}: {failed[kind]}"
                )
        if not some and items:
            continue
        try:
            result = attempt([*done, *some])
            done += some
        except PartError as failure:
            if not some:
                raise
            if len(some) > 1:
                half = len(some) // 2
                waiting += [some[half:], some[:half]]
                continue
            faulty[some[0]] = failure
            count = len(faulty) // _MOST_FAULTY
            failed = {
                kind: why for item, why in reversed(faulty.items()) for kind in kinds(item)[:count]
            }
    return result, faulty | untried


def kinds_of(node: ir.Node) -> tuple[str, str]:
    """What a node is alike, for `without_faulty`: its operator with the shapes of its constants, or its operator."""
    shapes = (
        constant.shape for value in node.inputs if (constant := constant_of(value)) is not None
    )
    listed = " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
    return f"{node.op_type} with {listed or 'no constants'}", node.op_type


class _Feed(dict[str, Any]):
    """The inputs of a run, which is one without inputs too: ONNX Runtime takes an empty mapping for the end of runs."""

    def __bool__(self) -> bool:
        return True


class OneRun:
    """A run as ONNX Runtime's calibrators read their data."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._left = [_Feed(arrays)]

    def get_next(self) -> Mapping[str, Array] | None:
        """The run; None after it."""
        return self._left.pop() if self._left else None


def groups_in_memory(nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """Nodes in groups whose weights fit into memory; those that share a weight are in one, so that it is read once.

    Those of each graph are apart, and convolutions, which have other weights.
    """
    apart: dict[Any, list[ir.Node]] = {}
    for node in nodes:
        apart.setdefault((node.graph, node.op_type == "Conv"), []).append(node)
    yield from counted(
        [group for alike in apart.values() for group in _groups(alike)], "groups of weights"
    )


def _groups(nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
    by_weight: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        by_weight[next(iter(_weights_of(node)), None)].append(node)
    sizes = {weight: sum(_weights_of(readers[0]).values()) for weight, readers in by_weight.items()}
    most = max(GROUP_BYTES, sum(sizes.values()) // _MOST_GROUPS)
    groups: list[list[ir.Node]] = []
    size = 0
    for weight, readers in by_weight.items():
        if not groups or size + sizes[weight] > most:
            groups.append([])
            size = 0
        groups[-1] += readers
        size += sizes[weight]
    order = {node: place for place, node in enumerate(nodes)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def _weights_of(node: ir.Node) -> dict[ir.Value, int]:
    """The constants that a node reads as floats, with their bytes."""
    tensors = {
        value: tensor
        for value in node.inputs
        if value is not None and (tensor := constant_of(value))
    }
    return {
        value: tensor.nbytes
        for value, tensor in tensors.items()
        if tensor.dtype.is_floating_point()
    }


@contextlib.contextmanager
def made_file() -> Iterator[Path]:
    """A place for what a quantizer makes.

    `read_model` leaves its large tensors there: they are read when they are used, also after the
    file is deleted.
    """
    with temporary_folder() as folder:
        yield folder / "made.onnx"
