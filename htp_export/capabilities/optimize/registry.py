"""Passes: names and levels, the registry, node by node rewriting, and notes on unchanged nodes."""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from htp_export.discovery import names_in, plug_ins
from htp_export.editing.editing import add_constant, is_boundary, remove_unused
from htp_export.errors import InputError
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic

Level: TypeAlias = Literal["exact", "tolerant", "fused"]
LEVELS: tuple[Level, ...] = ("exact", "tolerant", "fused")
"""Effects of a pass on results: none; up to 1e-5; likewise, with operators of ONNX Runtime only."""

_FOLDER = "htp_export.capabilities.optimize.passes"

DEFAULT = (
    "fuse_group_query_attention",
    "fuse_for_onnxruntime",
    "eliminate_dead_nodes",
    "eliminate_identity_ops",
    "simplify_shape_chains",
    "inline_branches",
    "fold_constants",
    "eliminate_duplicate_constants",
    "eliminate_common_subexpressions",
    "eliminate_redundant_transposes",
    "merge_reshapes",
    "merge_layout_ops",
    "merge_slices",
    "eliminate_whole_gathers",
    "eliminate_expands",
    # before factors are merged: 0.5 of a GELU belongs to it
    "fuse_single_steps",
    "fuse_single_steps_for_onnxruntime",
    "cleanup_attention",
    "simplify_arithmetic",
    "merge_constant_sums",
    "eliminate_nan_guards",
    "merge_reductions",
    "fuse_normalization_scale",
    "fuse_pad_into_conv",
    "fuse_conv_batchnorm",
    "merge_parallel_projections",
    "fuse_matmul_add",
    "fuse_conv_relu",
    "eliminate_unused_initializers",
)
"""The default passes in order; passes that are registered with ``after`` come between them."""


@dataclass(frozen=True)
class PassInfo:
    """A registered pass.

    Attributes:
        name: Its name.
        level: Its effect on the results, one of `LEVELS`.
        make: Creates the pass, without arguments.
        after: The default pass after which it runs by default; None for passes of `DEFAULT`, and
            for passes that run only by name.
    """

    name: str
    level: Level
    make: Callable[[], ir.passes.PassBase]
    after: str | None = None

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        return (self.make.__doc__ or "").strip().partition("\n")[0]

    @property
    def may_fail(self) -> bool:
        """Whether the pass is undone if it fails, see `LibraryPass`.

        Other passes raise the error.
        """
        return isinstance(self.make, type) and issubclass(self.make, LibraryPass)

    def applies(self, model: ir.Model) -> bool:
        """Whether a model meets the requirements of the pass, if the pass states any."""
        if isinstance(self.make, type) and issubclass(self.make, NodePass):
            return self.make.applies(model)
        return True


_registered: dict[str, PassInfo] = {}  # by ``register``

_Make = TypeVar("_Make", bound=Callable[[], ir.passes.PassBase])


def register(name: str, level: Level, after: str | None = None) -> Callable[[_Make], _Make]:
    """Register a pass under a name: a class, or a function without arguments, that creates it.

    The pass is an onnx_ir pass, and does not need to know about tags. It has to follow one rule: a
    node that stays computes the same as before. A different computation needs a new node, and the
    name of a value must not be used for another value.

    Args:
        name: The name. A pass that is registered again replaces the earlier one.
        level: ``"exact"`` if outputs stay the same bit for bit, ``"tolerant"`` if they may change
            by 1e-5, ``"fused"`` if the pass uses operators that only ONNX Runtime has.
        after: The default pass after which the new one runs by default; None to run it only by
            name.

    Raises:
        InputError: If the level has another value, or ``after`` is no default pass.

    Examples:
        >>> import onnx_ir as ir
        >>> @register("do_nothing", level="exact")
        ... class DoNothing(ir.passes.InPlacePass):
        ...     '''Does nothing.'''
        ...     def call(self, model):
        ...         return ir.passes.PassResult(model, modified=False)
        >>> find("do_nothing").summary
        'Does nothing.'
        >>> del _registered["do_nothing"]
    """
    if level not in LEVELS:
        raise InputError(f"pass {name!r}: level {level!r} is none of {', '.join(LEVELS)}")

    if after is not None and after not in DEFAULT:
        raise InputError(
            f"pass {name!r}: after={after!r} is no default pass; there are {', '.join(DEFAULT)}"
        )

    def decorate(make: _Make) -> _Make:
        _registered[name] = PassInfo(name, level, make, after)
        return make

    return decorate


def available() -> dict[str, PassInfo]:
    """Every pass by name, also of installed packages.

    Their entry points, of the group ``htp_export.passes``, name a pass, or a module that registers
    passes.

    Examples:
        >>> available()["eliminate_dead_nodes"].level
        'exact'
    """
    for name in names_in(_FOLDER):
        if name not in _registered:
            importlib.import_module(f"{_FOLDER}.{name}")
    for name, entry in plug_ins("passes").items():
        if name in _registered:
            continue
        loaded = entry.load()
        is_pass = isinstance(loaded, type) and issubclass(loaded, ir.passes.PassBase)
        if is_pass and name not in _registered:  # a module may register it when it is loaded
            register(name, getattr(loaded, "level", "tolerant"))(loaded)
    return dict(_registered)


def find(name: str) -> PassInfo:
    """The pass with a name.

    Raises:
        InputError: If there is none; the message lists all passes.
    """
    passes = _registered if name in _registered else available()
    if name not in passes:
        raise InputError(f"no pass {name!r}; there are: {', '.join(sorted(passes))}")
    return passes[name]


def choose(passes: str | Sequence[str], level: Level) -> list[PassInfo]:
    """The passes to run: ``"default"``, names with commas between them, or a list of names.

    Among names, ``default`` means all default passes up to the level.

    Raises:
        InputError: If there is no such pass or level, or if a named pass is above the level.
    """
    if level not in LEVELS:
        raise InputError(f"level {level!r} is none of {', '.join(LEVELS)}")
    allowed = LEVELS[: LEVELS.index(level) + 1]
    chosen: list[PassInfo] = []
    names = passes.split(",") if isinstance(passes, str) else passes
    for name in map(str.strip, names):
        if name == "default":
            chosen += [info for info in _default_passes() if info.level in allowed]
            continue
        info = find(name)
        if info.level not in allowed:
            raise InputError(
                f"pass {info.name!r} is {info.level}, more than level {level!r} allows"
            )
        chosen.append(info)
    if not chosen:
        raise InputError("no passes were named; give 'default' or names")
    return chosen


def _default_passes() -> Iterator[PassInfo]:
    """The default passes in order, each with the passes registered after it."""
    every = available().values()
    for name in DEFAULT:
        yield find(name)
        yield from (info for info in every if info.after == name)


_SHAPES: ContextVar[dict[ir.Graph, Symbolic] | None] = ContextVar(
    "htp_export.shapes_of_passes", default=None
)


@contextlib.contextmanager
def shared_shapes(shapes: dict[ir.Graph, Symbolic] | None) -> Iterator[None]:
    """Share what `shapes_in` infers among passes that do not change the model; not with None."""
    token = _SHAPES.set(shapes)
    try:
        yield
    finally:
        _SHAPES.reset(token)


def shapes_in(graph: ir.Graph, opsets: Mapping[str, int] | None = None) -> Symbolic:
    """Shapes and types in a graph; for a pass that has not changed it yet.

    Arguments as of `Symbolic`. If an earlier pass inferred them, and none has changed the model
    since, they are not inferred again.
    """
    shared = _SHAPES.get()
    if shared is None:
        return Symbolic(graph, opsets)
    if graph not in shared:
        shared[graph] = Symbolic(graph, opsets)
    return shared[graph]


class NodePass(ir.passes.InPlacePass):
    """Visits the nodes of the main graph in order, and rewrites each if possible.

    Attributes:
        operators: The ONNX operators of the nodes that the pass visits; empty for all nodes.
        opset: The lowest opset that it supports; in files of an older one it does nothing.
        graph: The graph, while the pass runs.
    """

    operators: ClassVar[tuple[str, ...]]
    opset: ClassVar[int] = 1
    graph: ir.Graph
    _modified: bool = False

    @classmethod
    def applies(cls, model: ir.Model) -> bool:
        """Whether a model has the opset that the pass requires, and a node of its operators.

        Examples:
            >>> class OfRelu(NodePass):
            ...     operators = ("Relu",)
            >>> graph = ir.Graph([], [], nodes=[ir.node("Relu", [ir.val("x")])], opset_imports={"": 20})
            >>> OfRelu.applies(ir.Model(graph, ir_version=10))
            True
        """
        graph = model.graph
        if graph.opset_imports.get("", 1) < cls.opset:
            return False
        return any(is_standard(node, *cls.operators) for node in graph)

    @cached_property
    def known(self) -> Symbolic:
        """Shapes and types in the graph, as of their first use."""
        return Symbolic(self.graph) if self._modified else shapes_in(self.graph)

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> bool:
        """Rewrite a node and its producers, and return whether anything changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.graph = model.graph
        self.__dict__.pop("known", None)
        self._modified = False
        for node in model.graph if self.applies(model) else ():
            if is_standard(node, *self.operators):
                self._modified |= self.rewrite(node)
        if self._modified:
            remove_unused(model)
        return ir.passes.PassResult(model, self._modified)


class LibraryPass(ir.passes.InPlacePass):
    """A pass that another library computes: if it raises an error, the pass is undone.

    Such an error is no fault of the model.
    """


class LibraryResult(ir.passes.PassResult):
    """The result of a `LibraryPass`.

    ``left``: nodes that the library cannot handle → why they are unchanged.
    """

    def __init__(self, model: ir.Model, modified: bool, left: Mapping[str, str]) -> None:
        super().__init__(model, modified)
        self.left = left


def absorbed(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a value, of these operators, if the consumer of the value can absorb it.

    None if the value has several consumers, or is an input or output of a module.
    """
    if value is None or is_boundary(value) or only_consumer(value) is None:
        return None
    return producer_of(value, *op_types)


def integers(node: ir.Node, numbers: Sequence[int], what: str) -> ir.Value:
    """A new initializer of int64, named after the output of the rewritten node."""
    if node.graph is None:
        raise ValueError(f"{node.op_type} {node.name!r} is in no graph")
    return add_constant(node.graph, np.array(numbers, np.int64), f"{node.outputs[0].name}_{what}")


_KEY, _CHANGED = "htp_export.declined", "htp_export.changed"  # in a node's ``meta``, never in files


@dataclass(frozen=True)
class Declined:
    """Nodes that a pass leaves unchanged, and why."""

    kind: str  # a key of `htp_export.capabilities.forensics.finding.KINDS`, or the name of the pass
    nodes: tuple[ir.Node, ...]
    why: str = ""
    detail: str = ""


def decline(kind: str, nodes: Sequence[ir.Node], why: str) -> Literal[False]:
    """Record on the last node why a pass leaves some nodes unchanged.

    `htp_export.forensics` reports it.

    Returns False, as `NodePass.rewrite` does for an unchanged node.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> decline("conv_relu", [relu], "other nodes read the result of the Conv")
        False
        >>> [(note.kind, note.why) for note in declined([relu])]
        [('conv_relu', 'other nodes read the result of the Conv')]
    """
    nodes[-1].meta.setdefault(_KEY, {})[kind] = Declined(kind, tuple(nodes), why)
    return False


def changed(kind: str, node: ir.Node) -> Literal[True]:
    """Record the kind of finding on a node that a pass removes, if the pass has several kinds.

    Returns True, as `NodePass.rewrite` does for a changed node.
    """
    node.meta[_CHANGED] = kind
    return True


def kind_of_change(nodes: Sequence[ir.Node]) -> str | None:
    """The kind that a pass recorded on the last of some removed nodes; None without a record."""
    for node in reversed(nodes):
        if _CHANGED in node.meta:
            kind: str = node.meta[_CHANGED]
            return kind
    return None


def declined(nodes: Sequence[ir.Node]) -> Iterator[Declined]:
    """The notes of passes on nodes."""
    for node in nodes:
        yield from node.meta.get(_KEY, {}).values()
