"""Entries of a map: a node, a module, a parameter and a weight, each with those that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from htp_export.format.torch_metadata import SourceLine
from htp_export.reporting.result import PlainData


class _Use:
    """The use of a parameter, with its transformations ``how``."""

    name: str
    how: tuple[str, ...]

    def __str__(self) -> str:
        if self.how:
            return f"{self.name} ({', '.join(self.how)})"
        return self.name


@dataclass(frozen=True)
class ParameterUse(_Use):
    """A parameter that a node uses, or that an initializer contains.

    Attributes:
        name: Its name in PyTorch; of tied ones, the name in the module of the node.
        initializer: The initializer that contains it.
        how: Its transformations, in order: ``transposed``, ``cast``, ...; empty if there are none.
    """

    name: str
    initializer: str
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class InitializerUse(_Use):
    """An initializer that contains a parameter.

    Attributes:
        name: Its name.
        how: The transformations of the parameter; empty if there are none.
    """

    name: str
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedNode(PlainData):
    """A node.

    Attributes:
        name: Its name; that of its first output if it has none.
        operator: Its operator, with the domain if that is not ONNX's.
        modules: The modules that it computes, in execution order; several if work was merged.
        calls: Module → numbers of its calls that the node computes, for modules that ran several
            times.
        reason: The evidence for the modules, a word of ``docs/format.md``.
        parameters: The parameters that it uses, directly or through nodes that only transpose,
            cast or reshape them.
        inputs: Names of its input tensors; ``""`` for an absent input.
        outputs: Names of its output tensors.
        inside: The function that contains it, or the node whose branch or loop body contains it;
            ``""`` for the main graph.
        index: Its position among the nodes of the graph, branch, loop body or function that contains
            it, from 0.
        stack: The Python lines at which it was captured, the innermost last; empty if the file
            does not contain them.
        function: The function that contains it, directly or in a branch or loop body; its tensors
            have names of their own.
        line: The innermost line outside of torch, with its code; None if it is unknown.
    """

    derived = ("source",)

    name: str
    operator: str
    modules: tuple[str, ...] = ()
    calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""
    parameters: tuple[ParameterUse, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    inside: str = ""
    index: int = 0
    stack: tuple[SourceLine, ...] = ()
    function: str = field(default="", repr=False)
    line: SourceLine | None = field(default=None, repr=False)

    @property
    def source(self) -> str:
        """The innermost Python line outside of torch, ``/path/net.py:7``; ``""`` if it is unknown."""
        return "" if self.line is None else f"{self.line.file}:{self.line.line}"


class _WithNodes(PlainData):
    """An entry with nodes, which are names in plain data."""

    nodes: tuple[MappedNode, ...]

    def data(self) -> dict[str, Any]:
        return {**super().data(), "nodes": [node.name for node in self.nodes]}


@dataclass(frozen=True)
class MappedModule(_WithNodes):
    """A module.

    Attributes:
        path: Its path.
        class_name: Its class.
        calls: Number of its runs.
        fate: Its fate, a word of ``docs/format.md``.
        nodes: The nodes that it computes itself, without nodes of its descendants.
        parameters: Names of its own parameters.
    """

    path: str
    class_name: str = ""
    calls: int = 0
    fate: str = ""
    nodes: tuple[MappedNode, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedParameter(_WithNodes):
    """A parameter of the PyTorch model.

    Attributes:
        name: Its name, as in ``model.named_parameters()``.
        module: The module that owns it.
        shape: Its shape in PyTorch.
        tied: The name of the same parameter in an earlier module; ``""`` if there is none.
        initializers: The initializers that contain it; empty if it is unused.
        nodes: The nodes that use it.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    tied: str = ""
    initializers: tuple[InitializerUse, ...] = ()
    nodes: tuple[MappedNode, ...] = ()


@dataclass(frozen=True)
class MappedInitializer(_WithNodes):
    """A weight of the file: an initializer, or the value of a ``Constant``.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        dtype: The type of its elements, by numpy's name.
        parameters: The parameters that it contains; empty for buffers and constants.
        nodes: The nodes that use it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameters: tuple[ParameterUse, ...] = ()
    nodes: tuple[MappedNode, ...] = ()
