"""ONNX Runtime's quantizers: imported on first use, without their messages and logging."""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir

from htp_export.editing.submodels import constant_of
from htp_export.errors import HtpExportError, ToolError, described
from htp_export.extras import required
from htp_export.files.filesystem import temporary_folder
from htp_export.process.progress import counted
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array

GROUP_BYTES = 32 << 20
"""Bytes of weights that are in memory at a time; a single weight may be larger."""

_MOST_GROUPS = 256
"""The largest number of groups, of which each leaves an open file: some systems allow 1024 for a
process. Groups of huge models are larger."""

_GROUP_WEIGHTS = 100
"""The largest number of weights of a group, unless that makes too many groups: ONNX Runtime searches
all weights of the part that it quantizes for each product."""

_PACKAGE = "onnxruntime"
_QUANTIZATION = f"{_PACKAGE}.quantization"

_MOST_FAULTY = 32
"""Failures after which nodes similar to a faulty one are left out untried: isolating one node takes
about ten attempts, each of which quantizes the other nodes, too."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def quantizers(module: str = "") -> Any:
    """Import ``onnxruntime.quantization``, or a module of it.

    Some of its modules call ``logging.basicConfig`` on import, which would change the logging of the
    user's program.
    """
    with quietly():
        name = f"{_QUANTIZATION}.{module}" if module else _QUANTIZATION
        return required(name, "this precision")


def quietly() -> contextlib.AbstractContextManager[None]:
    """Suppress the messages of ONNX Runtime's quantizers, which log to the root logger.

    They contain advice that the caller cannot follow, such as to preprocess the model.
    """
    return quiet("")


class PartError(Exception):
    """ONNX Runtime's quantizer failed on a part; the message has the names of the whole model."""


def raised_by_tool(error: Exception) -> bool:
    """Whether an error was raised by ONNX Runtime, or by code that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(_PACKAGE in Path(frame.filename).parts for frame in frames)


def tool_error(name: str, error: Exception, where: str = "") -> ToolError:
    """A `ToolError` for a quantizer that failed on the model ``name``; ``where`` names the node."""
    problem = str(error) if isinstance(error, PartError) else described(error)
    return ToolError(_QUANTIZATION, f"failed on {name}: {problem}{where}")


@contextlib.contextmanager
def tool_failures(in_text: Callable[[str], str]) -> Iterator[None]:
    """Convert errors of ONNX Runtime to `PartError`; ``in_text`` inserts the user's names."""
    try:
        yield
    except HtpExportError:
        raise
    except Exception as error:
        if not raised_by_tool(error):
            raise
        raise PartError(in_text(described(error))) from error


def without_faulty(
    items: Sequence[Item],
    attempt: Callable[[Sequence[Item]], Result],
    kinds: Callable[[Item], Sequence[str]],
) -> tuple[Result | None, dict[Item, PartError]]:
    """Attempt as many items as possible: the result without the faulty ones, and their failures.

    The items are added by halves to those that succeeded so far; each failure halves further. After
    every `_MOST_FAULTY` failures, one more kind of the failed items counts, and items of such a kind
    are left out without an attempt.

    Args:
        items: The items, in order.
        attempt: Computes a result for a subset; raises `PartError` if an item is faulty.
        kinds: The kinds of an item, the narrowest first.

    Returns:
        The result, None if all items are faulty; and the failure of each item that is left out.

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
    failed: dict[str, PartError] = {}  # kind that counts → its first failure
    untried: dict[Item, PartError] = {}
    waiting = [list(items)]
    while waiting:
        subset = []
        for item in waiting.pop():
            kind = next((kind for kind in kinds(item) if kind in failed), None)
            if kind is None:
                subset.append(item)
            else:
                untried[item] = PartError(
                    f"not tried after failures, one of which on a similar {kind}: {failed[kind]}"
                )
        if not subset and items:
            continue
        try:
            result = attempt([*done, *subset])
            done += subset
        except PartError as failure:
            if not subset:
                raise
            if len(subset) > 1:
                half = len(subset) // 2
                waiting += [subset[half:], subset[:half]]
                continue
            faulty[subset[0]] = failure
            failed = _failed_kinds(faulty, kinds)
    return result, faulty | untried


def _failed_kinds(
    faulty: Mapping[Item, PartError], kinds: Callable[[Item], Sequence[str]]
) -> dict[str, PartError]:
    """The kinds that count after so many failures, each with its first failure."""
    count = len(faulty) // _MOST_FAULTY
    failed: dict[str, PartError] = {}
    for item, failure in faulty.items():
        for kind in kinds(item)[:count]:
            failed.setdefault(kind, failure)
    return failed


def kinds_of(node: ir.Node) -> tuple[str, str]:
    """The kinds of a node: its operator with the shapes of constants, and its operator."""
    shapes: list[str] = []
    for value in node.inputs:
        tensor = constant_of(value)
        if tensor is not None:
            shapes.append("x".join(map(str, tensor.shape)) or "a number")
    return f"{node.op_type} with {' and '.join(shapes) or 'no constants'}", node.op_type


class _Feed(dict[str, Any]):
    """The inputs of a run; true even if empty: an empty mapping ends the runs."""

    def __bool__(self) -> bool:
        return True


class OneRun:
    """The inputs of one run, in the interface of ``CalibrationDataReader``."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._left = [_Feed(arrays)]

    def get_next(self) -> Mapping[str, Array] | None:
        """The inputs; None after the first call."""
        return self._left.pop() if self._left else None


def groups_in_memory(nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """Divide nodes into groups whose weights fit into memory, and are not too many for a search.

    Nodes that share a weight are in one group, so that it is read once. Nodes of different graphs
    are in different groups, and so are convolutions, whose weights get another type.
    """
    apart: dict[Any, list[ir.Node]] = {}
    for node in nodes:
        apart.setdefault((node.graph, node.op_type == "Conv"), []).append(node)
    groups: list[list[ir.Node]] = []
    for members in apart.values():
        groups += _groups(members)
    yield from counted(groups, "groups of weights")


def _groups(nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
    consumers_of: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        consumers_of[next(iter(_weights_of(node)), None)].append(node)
    sizes = {
        weight: sum(_weights_of(consumers[0]).values())
        for weight, consumers in consumers_of.items()
    }
    most = max(GROUP_BYTES, sum(sizes.values()) // _MOST_GROUPS)
    most_weights = max(_GROUP_WEIGHTS, len(sizes) // _MOST_GROUPS)
    groups: list[list[ir.Node]] = []
    size = 0
    weights = 0
    for weight, consumers in consumers_of.items():
        if not groups or size + sizes[weight] > most or weights == most_weights:
            groups.append([])
            size = 0
            weights = 0
        groups[-1] += consumers
        size += sizes[weight]
        weights += 1
    # By weight, nodes lose the order of execution, in which a part is cut out.
    order = {node: place for place, node in enumerate(nodes)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def _weights_of(node: ir.Node) -> dict[ir.Value, int]:
    """The constant float inputs of a node, with their bytes."""
    sizes: dict[ir.Value, int] = {}
    for value in node.inputs:
        tensor = constant_of(value)
        if value is not None and tensor is not None and tensor.dtype.is_floating_point():
            sizes[value] = tensor.nbytes
    return sizes


@contextlib.contextmanager
def made_file() -> Iterator[Path]:
    """A temporary file for the output of a quantizer.

    `read_model` keeps its large tensors on disk: they are read when they are used, also after the
    file is deleted.
    """
    with temporary_folder() as folder:
        yield folder / "made.onnx"
