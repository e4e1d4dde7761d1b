"""The rows of a map: nodes, modules, parameters and initializers, each with the others that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from htp_export.model.source_lines import SourceLine
from htp_export.results.result import PlainData

__all__ = [
    "InitializerUse",
    "MappedInitializer",
    "MappedModule",
    "MappedNode",
    "MappedParameter",
    "ParameterUse",
]


def _with_words(name: str, how: Sequence[str]) -> str:
    return f"{name} ({', '.join(how)})" if how else name


@dataclass(frozen=True)
class ParameterUse:
    """A parameter that a node reads, or that an initializer holds.

    Attributes:
        name: Its name in PyTorch; of tied ones, that in the module of the node.
        initializer: The initializer that holds it.
        how: What was done to it, in order: ``transposed``, ``cast``, ...; empty if nothing was.
    """

    name: str
    initializer: str
    how: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _with_words(self.name, self.how)


@dataclass(frozen=True)
class InitializerUse:
    """An initializer that holds a parameter.

    Attributes:
        name: Its name.
        how: What was done to the parameter; empty if nothing was.
    """

    name: str
    how: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _with_words(self.name, self.how)


@dataclass(frozen=True)
class MappedNode(PlainData):
    """A node.

    Attributes:
        name: Its name; that of its first output if it has none.
        operator: Its operator, with the domain if that is not ONNX's.
        modules: The modules that it computes, in order of execution; several if work was merged.
        calls: Module → numbers of its calls that the node computes, for modules that ran several times.
        reason: How the modules are known, a word of ``docs/format.md``.
        parameters: The parameters that it reads, directly or through nodes that only transpose, cast or reshape them.
        inputs: Names of the tensors that it reads; ``""`` for an input that is left out.
        outputs: Names of the tensors that it gives.
        inside: The function that it is in, or the node whose branch or loop body it is in; ``""`` for the main graph.
        stack: The lines of Python that it was captured at, the innermost last; empty if the file does not say them.
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
    stack: tuple[SourceLine, ...] = ()

    @property
    def source(self) -> str:
        """The innermost line of Python, ``/path/net.py:7``; ``""`` if it is unknown."""
        return f"{self.stack[-1].file}:{self.stack[-1].line}" if self.stack else ""


class _WithNodes(PlainData):
    """What has nodes, which stand under their names in plain data."""

    nodes: tuple[MappedNode, ...]

    def data(self) -> dict[str, Any]:
        """What `to_dict` has."""
        return {**super().data(), "nodes": [node.name for node in self.nodes]}


@dataclass(frozen=True)
class MappedModule(_WithNodes):
    """A module.

    Attributes:
        path: Its path.
        class_name: Its class.
        calls: How many times it ran.
        fate: What became of it, one of those in ``docs/format.md``.
        nodes: The nodes that it computes itself, without those of the modules inside it.
        parameters: Names of the parameters that it holds itself.
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
        module: The module that holds it.
        shape: Its shape in PyTorch.
        tied: The name of the same parameter in an earlier module; ``""`` if there is none.
        initializers: The initializers that hold it; none if nothing reads it.
        nodes: The nodes that read it.
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
        dtype: The type of its elements, as numpy names it.
        parameters: The parameters that it holds; none for buffers and constants.
        nodes: The nodes that read it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameters: tuple[ParameterUse, ...] = ()
    nodes: tuple[MappedNode, ...] = ()
