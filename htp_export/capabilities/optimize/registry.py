"""What a pass is: its name and level, what it rewrites node by node, what it notes on nodes; and which there are."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Effects of a pass on results: none; up to 1e-5; the same, with operators that only ONNX Runtime has."""

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
    """A pass that can be named.

    Attributes:
        name: Its name.
        level: What it may do to the results, one of `LEVELS`.
        make: Makes the pass, without arguments.
        after: The default pass after which it runs by default; None for those of `DEFAULT`, and for
            passes that run only by name.
    """

    name: str
    level: Level
    make: Callable[[], ir.passes.PassBase]
    after: str | None = None

    @property
    def summary(self) -> str:
        """What it does: the first line of its documentation."""
        return (self.make.__doc__ or "").strip().partition("\n")[0]

    @property
    def may_fail(self) -> bool:
        """Whether the pass is undone if it fails, see `LibraryPass`; of any other pass, the error is raised."""
        return isinstance(self.make, type) and issubclass(self.make, LibraryPass)

    def applies(self, model: ir.Model) -> bool:
        """Whether a model has what the pass requires, as far as it states that."""
        return not (
            isinstance(self.make, type) and issubclass(self.make, NodePass)
        ) or self.make.applies(model)


_registered: dict[str, PassInfo] = {}  # by ``register``

_Make = TypeVar("_Make", bound=Callable[[], ir.passes.PassBase])


def register(name: str, level: Level, after: str | None = None) -> Callable[[_Make], _Make]:
    """Make a pass known by a name; for a class, or a function without arguments, that makes an onnx_ir pass.

    The pass does not need to know about tags. It has to follow one rule: a node that stays computes
    what it computed before. What computes something else is a new node, and uses the name of a
    value only for that value.

    Args:
        name: The name. A name that is registered again means the new pass.
        level: ``"exact"`` if outputs stay the same bit for bit, ``"tolerant"`` if they may change
            by 1e-5, ``"fused"`` if the pass uses operators that only ONNX Runtime has.
        after: The default pass after which the new one runs by default; None to run it only by
            name.

    Raises:
        InputError: If the level is none of these, or ``after`` is no default pass.

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
    """Every pass by name, those of installed packages too.

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
        loaded = entry.load() if name not in _registered else None
        if (
            isinstance(loaded, type)
            and issubclass(loaded, ir.passes.PassBase)
            and name not in _registered
        ):
            register(name, getattr(loaded, "level", "tolerant"))(loaded)
    return dict(_registered)


def find(name: str) -> PassInfo:
    """The pass of a name.

    Raises:
        InputError: If there is none; the message lists those there are.
    """
    known = _registered if name in _registered else available()
    if name not in known:
        raise InputError(f"no pass {name!r}; there are: {', '.join(sorted(known))}")
    return known[name]


def choose(passes: str | Sequence[str], level: Level) -> list[PassInfo]:
    """The passes to run: ``"default"``, names with commas between them, or a list of names.

    Among names, ``default`` means all default passes, without those that do more to the results
    than the level allows.

    Raises:
        InputError: If there is no such pass or level, or if a pass is named that does more than the
            level allows.
    """
    if level not in LEVELS:
        raise InputError(f"level {level!r} is none of {', '.join(LEVELS)}")
    allowed = LEVELS[: LEVELS.index(level) + 1]
    chosen: list[PassInfo] = []
    for name in map(str.strip, passes.split(",") if isinstance(passes, str) else passes):
        if name == "default":
            every = available().values()
            in_order = (
                info
                for base in DEFAULT
                for info in (find(base), *(i for i in every if i.after == base))
            )
            chosen += [info for info in in_order if info.level in allowed]
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


class NodePass(ir.passes.InPlacePass):
    """Looks at the nodes of the main graph in order, and rewrites each where it can.

    Attributes:
        operators: What the pass requires: it looks at nodes of these operators of ONNX; if there
            are none, at all.
        opset: The lowest opset that it requires; in files of an older one it does nothing.
        graph: The graph, while the pass runs.
    """

    operators: ClassVar[tuple[str, ...]]
    opset: ClassVar[int] = 1
    graph: ir.Graph

    @classmethod
    def applies(cls, model: ir.Model) -> bool:
        """Whether a model is of the opset, and has a node of the operators, that the pass requires.

        Examples:
            >>> class OfRelu(NodePass):
            ...     operators = ("Relu",)
            >>> graph = ir.Graph([], [], nodes=[ir.node("Relu", [ir.val("x")])], opset_imports={"": 20})
            >>> OfRelu.applies(ir.Model(graph, ir_version=10))
            True
        """
        graph = model.graph
        return graph.opset_imports.get("", 1) >= cls.opset and any(
            is_standard(n, *cls.operators) for n in graph
        )

    @cached_property
    def known(self) -> Symbolic:
        """Shapes and types in the graph, as they were when they were first asked for."""
        return Symbolic(self.graph)

    @abc.abstractmethod
    def rewrite(self, node: ir.Node) -> bool:
        """Rewrite a node, and what leads to it; whether anything was changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.graph = model.graph
        self.__dict__.pop("known", None)
        modified = False
        for node in model.graph if self.applies(model) else ():
            if is_standard(node, *self.operators):
                modified |= self.rewrite(node)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


class LibraryPass(ir.passes.InPlacePass):
    """A pass whose work another library does: an error of it is no fault of the model, and the pass is undone then."""


class LibraryResult(ir.passes.PassResult):
    """The result of a `LibraryPass`; ``left`` has nodes that the library cannot handle → why they stay as they are."""

    def __init__(self, model: ir.Model, modified: bool, left: Mapping[str, str]) -> None:
        super().__init__(model, modified)
        self.left = left


def absorbed(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a value, of these operators, that can go with the one consumer of the value.

    None if anything else reads the value, or if a module takes or gives it.
    """
    if value is None or is_boundary(value) or only_consumer(value) is None:
        return None
    return producer_of(value, *op_types)


def integers(node: ir.Node, numbers: Sequence[int], what: str) -> ir.Value:
    """A new initializer of int64, named after the output of the node that is rewritten."""
    if node.graph is None:
        raise ValueError(f"{node.op_type} {node.name!r} is in no graph")
    return add_constant(node.graph, np.array(numbers, np.int64), f"{node.outputs[0].name}_{what}")


_KEY, _CHANGED = "htp_export.declined", "htp_export.changed"  # in a node's ``meta``, never in files


@dataclass(frozen=True)
class Declined:
    """Nodes that a pass leaves as they are, and why."""

    kind: str  # a key of `htp_export.capabilities.forensics.finding.KINDS`, or the name of the pass
    nodes: tuple[ir.Node, ...]
    why: str = ""
    detail: str = ""


def decline(kind: str, nodes: Sequence[ir.Node], why: str) -> Literal[False]:
    """Note on the last of some nodes why a pass leaves them unchanged; `htp_export.forensics` reports it.

    False: so a `NodePass` says that it changed nothing.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> decline("conv_relu", [relu], "other nodes read the result of the Conv")
        False
        >>> [(each.kind, each.why) for each in declined([relu])]
        [('conv_relu', 'other nodes read the result of the Conv')]
    """
    nodes[-1].meta.setdefault(_KEY, {})[kind] = Declined(kind, tuple(nodes), why)
    return False


def changed(kind: str, node: ir.Node) -> Literal[True]:
    """Note on a node, which a pass eliminates, its kind of finding; for passes that change several kinds of nodes."""
    node.meta[_CHANGED] = kind
    return True


def kind_of_change(nodes: Sequence[ir.Node]) -> str | None:
    """What a pass noted on the last of some nodes that it eliminated; None if it noted nothing."""
    return next((node.meta[_CHANGED] for node in reversed(nodes) if _CHANGED in node.meta), None)


def declined(nodes: Sequence[ir.Node]) -> Iterator[Declined]:
    """The notes of passes on nodes."""
    for node in nodes:
        yield from node.meta.get(_KEY, {}).values()
