"""diff(): the differences between two files, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from htp_export.alignment.module_alignment import aligned_modules
from htp_export.editing.flattening import read_flat
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import Hasher
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import ModuleFacts, contents_of
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.reporting.columns import MODULE, Column, many
from htp_export.reporting.result import PlainData, Result, Table
from htp_export.reporting.tag_facts import TagFacts

STATUSES = ("same", "changed", "moved", "added", "removed")
"""The changes of a module; ``moved``: unchanged, under another path."""


@dataclass(frozen=True, kw_only=True)
class ModuleState(ModuleFacts, PlainData):
    """A module in one of the files: its facts there, and a hash of its computation.

    Attributes:
        operators: Operator → nodes; operators that are not ONNX's own with their domain,
            ``com.microsoft.Gelu``.
        structure: A hash of the computation of its region: operators, wiring, attributes, shapes
            and types of weights.
    """

    operators: Mapping[str, int]
    structure: str = field(repr=False)

    def data(self) -> dict[str, Any]:
        """The fields of `to_dict`; sizes by element type."""
        listed = ("path", "class_name", "fate", "nodes", "operators", "parameters", "structure")
        sizes = {
            "weight_bytes": self.weight_bytes_by_dtype,
            "shared_bytes": self.shared_bytes_by_dtype,
        }
        return {**{name: getattr(self, name) for name in listed}, **sizes}


_NOWHERE = ModuleState(path="", class_name="", operators={}, structure="")


@dataclass(frozen=True)
class ModuleDifference(PlainData):
    """One module in both files.

    Attributes:
        path: Its path in the second file; if it was removed, in the first.
        status: One of `STATUSES`.
        before: The module in the first file; None if it was added.
        after: The module in the second file; None if it was removed.
    """

    derived = ("moved_from", "nodes", "parameters", "weight_bytes", "shared_bytes", "operators")

    path: str = field(repr=False)
    status: str
    before: ModuleState | None
    after: ModuleState | None

    @property
    def moved_from(self) -> str | None:
        """Its path in the first file, if it had another path there."""
        if self.before is None or self.after is None or self.before.path == self.after.path:
            return None
        return self.before.path

    @property
    def simple_class(self) -> str:
        """The class name without its Python module; both names if the class changed."""
        classes = [
            state.class_name.rpartition(".")[2]
            for state in (self.before, self.after)
            if state is not None
        ]
        return " → ".join(dict.fromkeys(name for name in classes if name))

    @property
    def nodes(self) -> tuple[int, int]:
        """The number of its nodes, before and after."""
        return self._sides[0].nodes, self._sides[1].nodes

    @property
    def parameters(self) -> tuple[int, int]:
        """The number of its parameters, before and after."""
        return self._sides[0].parameters, self._sides[1].parameters

    @property
    def weight_bytes(self) -> Mapping[str, tuple[int, int]]:
        """Element type → bytes before and after; all types that its weights have."""
        before, after = (state.weight_bytes_by_dtype for state in self._sides)
        dtypes = sorted({*before, *after})
        return {dtype: (before.get(dtype, 0), after.get(dtype, 0)) for dtype in dtypes}

    @property
    def shared_bytes(self) -> Mapping[str, tuple[int, int]]:
        """Element type → bytes before and after of weights that nodes of other modules use, too.

        Every type of ``weight_bytes``.
        """
        before, after = (state.shared_bytes_by_dtype for state in self._sides)
        return {dtype: (before.get(dtype, 0), after.get(dtype, 0)) for dtype in self.weight_bytes}

    @property
    def _sides(self) -> tuple[ModuleState, ModuleState]:
        return self.before or _NOWHERE, self.after or _NOWHERE

    @property
    def operators(self) -> Mapping[str, int]:
        """Operator → nodes after minus nodes before, if not 0; the largest change first."""
        before, after = self._sides
        change = Counter(after.operators)
        change.subtract(before.operators)
        changed = [(op, count) for op, count in change.items() if count]
        return dict(sorted(changed, key=lambda item: (-abs(item[1]), item[0])))

    def data(self) -> dict[str, Any]:
        """The fields of `to_dict`: all differences."""
        return {**super().data(), "class": self.simple_class}


@dataclass(frozen=True)
class ModelDifference(Result):
    """The result of `diff`.

    Attributes:
        modules: Module path → its difference: the modules of the second file in their order, then
            the removed ones. ``""`` is the whole model.
        by_module: Whether both files have modules; otherwise there is only the whole model.
        tags: The tags of each file: source, reasons, untagged nodes.
    """

    derived = ("same", "unrelated", "counts")

    modules: Mapping[str, ModuleDifference]
    by_module: bool = True
    tags: tuple[TagFacts, ...] = ()

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Status → modules."""
        counts = Counter(module.status for module in self.modules.values())
        return {status: counts[status] for status in STATUSES if counts[status]}

    @property
    def same(self) -> bool:
        """Whether both files compute the same with weights of the same shapes and types.

        The values of weights are not compared.
        """
        return self.modules[""].status == "same" and set(self.counts) == {"same"}

    @property
    def unrelated(self) -> bool:
        """Whether both files have modules, and none but the root is in both, changed or not."""
        in_both = [path for path in self.modules if path and self._is_in_both(path)]
        return bool(self.added and self.removed and not in_both)

    def _is_in_both(self, path: str) -> bool:
        module = self.modules[path]
        return module.before is not None and module.after is not None

    def of(self, *statuses: str) -> list[ModuleDifference]:
        """The modules of some statuses."""
        return [module for module in self.modules.values() if module.status in statuses]

    @property
    def added(self) -> list[str]:
        """Paths of the modules that only the second file has."""
        return [module.path for module in self.of("added")]

    @property
    def removed(self) -> list[str]:
        """Paths of the modules that only the first file has."""
        return [module.path for module in self.of("removed")]

    @property
    def changed(self) -> list[str]:
        """Paths of the modules whose computation changed."""
        return [module.path for module in self.of("changed")]

    @property
    def moved(self) -> Mapping[str, str]:
        """Path of a module in the second file → its path in the first, if that is another one."""
        return {
            module.path: module.moved_from
            for module in self.modules.values()
            if module.moved_from is not None
        }

    def topmost(self) -> list[ModuleDifference]:
        """The modules that differ, without descendants that changed together with a listed one."""
        return [
            module
            for module in self.modules.values()
            if module.status != "same" and not self._implied(module)
        ]

    def _implied(self, module: ModuleDifference) -> bool:
        """Whether the difference follows from that of the module above."""
        above = tags.nearest_above(module.path, self.modules)
        if above is None or module.status == "changed":
            return False
        parent = self.modules[above]
        if parent.status != module.status:
            return False
        if module.status != "moved":
            return True
        relative = module.path[len(above) :]
        return module.moved_from == f"{parent.moved_from}{relative}"

    @property
    def summary(self) -> str:
        """The number of modules by status, in one line."""
        if self.same:
            modules = many(len(self.modules), "module")
            return f"no difference in {modules}; values of weights are not compared"
        counted = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        if self.unrelated:
            counted += "; no module is in both: these are files of different models"
        return f"modules: {counted}"

    def table(self) -> Table | None:
        """The modules that differ."""
        return None if self.same else ([MODULE, *DIFFERENCE_COLUMNS], self.topmost())


_MOST_OPERATORS = 5  # as many as fit a line of a table
_STYLES = {"same": "dim", "changed": "yellow", "moved": "cyan", "added": "green", "removed": "red"}


def byte_lines(module: ModuleDifference) -> Iterator[str]:
    """A line for each element type whose bytes changed, and for the type of most weights."""
    sizes, shared = module.weight_bytes, module.shared_bytes
    largest = max(sizes, key=lambda dtype: max(sizes[dtype]), default="")
    for dtype, (before, after) in sizes.items():
        shared_before, shared_after = shared[dtype]
        if before != after:
            first, second = _with_shared(before, shared_before), _with_shared(after, shared_after)
            yield f"{dtype} {first} → {second}"
        elif dtype == largest:
            yield f"{dtype} {before:,}"


def _with_shared(total: int, shared: int) -> str:
    if not shared:
        return f"{total:,}"
    if total <= shared:
        return f"{shared:,} shared"
    return f"{total - shared:,} + {shared:,} shared"


def _operator_changes(changes: Mapping[str, int]) -> str:
    listed = [f"{count:+d} {op}" for op, count in changes.items()]
    more = len(listed) - _MOST_OPERATORS
    return ", ".join(listed[:_MOST_OPERATORS]) + (f", {more} more" if more > 0 else "")


def _pair(sizes: tuple[int, int]) -> str:
    before, after = sizes
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def _status(module: ModuleDifference) -> str:
    if module.moved_from is None:
        return module.status
    return f"{module.status}, was {module.moved_from or '(root)'}"


DIFFERENCE_COLUMNS: tuple[Column[ModuleDifference], ...] = (
    Column("class", "class", lambda module: module.simple_class, style="cyan", right=False),
    Column("status", "status", _status, style=lambda module: _STYLES[module.status], right=False),
    Column("nodes", "nodes", text=_pair),
    Column("parameters", "parameters", text=_pair),
    Column("weight_bytes", "bytes", lambda module: "; ".join(byte_lines(module)), right=False),
    Column("operators", "operators", text=_operator_changes, style="dim", right=False),
)
"""The columns of a module, after its path."""


@names_model_faults("a", "b")
def diff(a: ModelSource, b: ModelSource) -> ModelDifference:
    """Compare two models by module: nodes, operators, parameters, bytes by element type.

    Modules are matched by path. A module of the second model without a match has moved if the first
    model has an unmatched module with the same structure, or with the same class and descendants.
    Values of weights are not read; different shapes or types are a change.

    Thread-safe, also for calls on the same model.

    Args:
        a: The first model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        b: The second model.

    Returns:
        The modules of both models; only the whole model if one of them has no tags.

    Raises:
        FileError: A file cannot be read.

    Examples:
        >>> import torch, htp_export
        >>> def exported(act):
        ...     net = torch.nn.Sequential(torch.nn.Linear(4, 8), act).eval()
        ...     return htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> found = diff(exported(torch.nn.ReLU()), exported(torch.nn.Tanh()))
        >>> found.changed, found.modules["1"].operators
        (['', '1'], {'Relu': -1, 'Tanh': 1})
    """
    first, second = read_flat(a), read_flat(b)
    by_module = "none" not in (first.source, second.source)
    before, after = _states(first, by_module), _states(second, by_module)
    counterparts = aligned_modules(before, after)
    modules: dict[str, ModuleDifference] = {}
    for path, state in after.items():
        old = before[counterparts[path]] if path in counterparts else None
        modules[path] = _compared(path, old, state)
    matched = set(counterparts.values())
    for path, state in before.items():
        if path not in matched:
            modules[path] = _compared(path, state, None)
    return ModelDifference(modules, by_module, (first.tag_facts, second.tag_facts))


def _compared(path: str, before: ModuleState | None, after: ModuleState | None) -> ModuleDifference:
    if before is None:
        return ModuleDifference(path, "added", before, after)
    if after is None:
        return ModuleDifference(path, "removed", before, after)
    # a file may have no class names
    classes = {side.class_name for side in (before, after) if side.class_name}
    differs = len(classes) > 1 or (before.structure, before.fate) != (after.structure, after.fate)
    if differs:
        status = "changed"
    elif before.path == after.path:
        status = "same"
    else:
        status = "moved"
    return ModuleDifference(path, status, before, after)


def _states(tagged: TaggedModel, by_module: bool) -> dict[str, ModuleState]:
    """Module path → its state; only the root, if the models are not compared by module."""
    contents, hasher = contents_of(tagged).modules, Hasher(GraphFacts(tagged))
    operators = tagged.index.counts(
        lambda node: f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    )
    states: dict[str, ModuleState] = {}
    for path in tagged.paths if by_module else [""]:
        facts = vars(contents[path].facts)
        counts = operators.get(path, {})
        states[path] = ModuleState(**facts, operators=counts, structure=hasher.region(path))
    return states
