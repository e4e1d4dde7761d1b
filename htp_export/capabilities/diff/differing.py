"""What differs between two files, module by module."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
"""What can have become of a module; ``moved`` is the same under another path."""


@dataclass(frozen=True, kw_only=True)
class ModuleState(ModuleFacts, PlainData):
    """A module in one of the files: its facts there, and what it computes.

    Attributes:
        operators: Operator → nodes; operators that are not ONNX's own with their domain,
            ``com.microsoft.Gelu``.
        structure: What its region computes, as a hash: operators, wiring, attributes, shapes and
            types of weights.
    """

    operators: Mapping[str, int]
    structure: str = field(repr=False)

    def data(self) -> dict[str, Any]:
        """What `to_dict` has; sizes by element type."""
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
        """Its path in the first file, where that is another one."""
        if self.before is None or self.after is None or self.before.path == self.after.path:
            return None
        return self.before.path

    @property
    def simple_class(self) -> str:
        """The class without its module; both, where it changed."""
        classes = [
            state.class_name.rpartition(".")[2]
            for state in (self.before, self.after)
            if state is not None
        ]
        return " → ".join(dict.fromkeys(name for name in classes if name))

    @property
    def nodes(self) -> tuple[int, int]:
        """How many nodes it has, before and after."""
        return self._sides[0].nodes, self._sides[1].nodes

    @property
    def parameters(self) -> tuple[int, int]:
        """How many parameters it has, before and after."""
        return self._sides[0].parameters, self._sides[1].parameters

    @property
    def weight_bytes(self) -> Mapping[str, tuple[int, int]]:
        """Element type → bytes before and after, types of which there are any."""
        first, second = (state.weight_bytes_by_dtype for state in self._sides)
        return {
            dtype: (first.get(dtype, 0), second.get(dtype, 0))
            for dtype in sorted({*first, *second})
        }

    @property
    def shared_bytes(self) -> Mapping[str, tuple[int, int]]:
        """The same of the weights that nodes of other modules read too; every type of ``weight_bytes``."""
        first, second = (state.shared_bytes_by_dtype for state in self._sides)
        return {dtype: (first.get(dtype, 0), second.get(dtype, 0)) for dtype in self.weight_bytes}

    @property
    def _sides(self) -> tuple[ModuleState, ModuleState]:
        return self.before or _NOWHERE, self.after or _NOWHERE

    @property
    def operators(self) -> Mapping[str, int]:
        """Operator → how many more there are than before, those that changed; the largest change first."""
        before, after = self._sides
        change = Counter(after.operators)
        change.subtract(before.operators)
        changed = [(op, count) for op, count in change.items() if count]
        return dict(sorted(changed, key=lambda item: (-abs(item[1]), item[0])))

    def data(self) -> dict[str, Any]:
        """What `to_dict` has: all that differs."""
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

    derived = ("same", "counts")

    modules: Mapping[str, ModuleDifference]
    by_module: bool = True
    tags: tuple[TagFacts, ...] = ()

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Status → modules."""
        found = Counter(module.status for module in self.modules.values())
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def same(self) -> bool:
        """Whether both files compute the same with weights of the same shapes and types; their values are not read."""
        return self.modules[""].status == "same" and set(self.counts) == {"same"}

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
        """Paths of the modules that compute otherwise than before."""
        return [module.path for module in self.of("changed")]

    @property
    def moved(self) -> Mapping[str, str]:
        """Path of a module in the second file → the other path that it has in the first."""
        return {
            module.path: module.moved_from
            for module in self.modules.values()
            if module.moved_from is not None
        }

    def topmost(self) -> list[ModuleDifference]:
        """The modules that differ, without those that were moved, added or removed together with one above them."""
        return [
            module
            for module in self.modules.values()
            if module.status != "same" and not self._implied(module)
        ]

    def _implied(self, module: ModuleDifference) -> bool:
        above = tags.nearest_above(module.path, self.modules)
        if (
            above is None
            or module.status == "changed"
            or self.modules[above].status != module.status
        ):
            return False
        if module.status != "moved":
            return True
        rest = module.path[len(above) :]
        return module.moved_from == f"{self.modules[above].moved_from}{rest}"

    @property
    def summary(self) -> str:
        """How many modules differ, and how."""
        if self.same:
            return f"no difference in {many(len(self.modules), 'module')}"
        return f"modules: {', '.join(f'{count} {status}' for status, count in self.counts.items())}"

    def table(self) -> Table | None:
        """The modules that differ."""
        return None if self.same else ([MODULE, *DIFFERENCE_COLUMNS], self.topmost())


_MOST_OPERATORS = 5  # what fits a line of a table
_STYLES = {"same": "dim", "changed": "yellow", "moved": "cyan", "added": "green", "removed": "red"}


def byte_lines(module: ModuleDifference) -> Iterator[str]:
    """A line for each element type that changed, and for the one that most is of."""
    sizes, shared = module.weight_bytes, module.shared_bytes
    most = max(sizes, key=lambda dtype: max(sizes[dtype]), default="")
    for dtype, (before, after) in sizes.items():
        if before != after:
            first, second = (
                _with_shared(*side) for side in zip(sizes[dtype], shared[dtype], strict=True)
            )
            yield f"{dtype} {first} → {second}"
        elif dtype == most:
            yield f"{dtype} {before:,}"


def _with_shared(total: int, shared: int) -> str:
    parts = [f"{total - shared:,}"] if total > shared or not shared else []
    return " + ".join([*parts, f"{shared:,} shared"] if shared else parts)


def _operator_changes(changes: Mapping[str, int]) -> str:
    listed = [f"{count:+d} {op}" for op, count in changes.items()]
    more = len(listed) - _MOST_OPERATORS
    return ", ".join(listed[:_MOST_OPERATORS]) + (f", {more} more" if more > 0 else "")


def _pair(sizes: tuple[int, int]) -> str:
    before, after = sizes
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def _status(module: ModuleDifference) -> str:
    return (
        module.status
        if module.moved_from is None
        else f"{module.status}, was {module.moved_from or '(root)'}"
    )


DIFFERENCE_COLUMNS: tuple[Column[ModuleDifference], ...] = (
    Column("class", "class", lambda module: module.simple_class, style="cyan", right=False),
    Column("status", "status", _status, style=lambda module: _STYLES[module.status], right=False),
    Column("nodes", "nodes", text=_pair),
    Column("parameters", "parameters", text=_pair),
    Column("weight_bytes", "bytes", lambda module: "; ".join(byte_lines(module)), right=False),
    Column("operators", "operators", text=_operator_changes, style="dim", right=False),
)
"""What is said of each module."""


@names_model_faults("a", "b")
def diff(a: ModelSource, b: ModelSource) -> ModelDifference:
    """Compare the structure of two models by module: nodes, operators, parameters, bytes by element type.

    Modules are matched by path. Of the others, a module with the same structure, or with the same
    class and child modules, has moved. Values of weights are not read; other shapes or types are a
    change.

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
    before, after = (_states(tagged, by_module) for tagged in (first, second))
    partner = _aligned(before, after)
    kept = set(partner.values())
    modules = {
        path: _compared(path, before[partner[path]] if path in partner else None, state)
        for path, state in after.items()
    }
    modules |= {
        path: _compared(path, state, None) for path, state in before.items() if path not in kept
    }
    return ModelDifference(modules, by_module, (first.tag_facts, second.tag_facts))


def _compared(path: str, before: ModuleState | None, after: ModuleState | None) -> ModuleDifference:
    if before is None or after is None:
        return ModuleDifference(path, "added" if before is None else "removed", before, after)
    classes = {side.class_name for side in (before, after) if side.class_name}  # a file may not say
    differs = len(classes) > 1 or (before.structure, before.fate) != (after.structure, after.fate)
    status = "changed" if differs else "same" if before.path == after.path else "moved"
    return ModuleDifference(path, status, before, after)


def _states(tagged: TaggedModel, by_module: bool) -> dict[str, ModuleState]:
    contents, hasher = contents_of(tagged).modules, Hasher(GraphFacts(tagged))
    operators = tagged.index.counts(
        lambda node: f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    )
    return {
        path: ModuleState(
            **vars(contents[path].facts),
            operators=operators.get(path, {}),
            structure=hasher.region(path),
        )
        for path in (tagged.paths if by_module else [""])
    }


def _aligned(before: Mapping[str, ModuleState], after: Mapping[str, ModuleState]) -> dict[str, str]:
    """Path in the second model → path in the first, for the modules that both have.

    Equal paths are the same module. What is left is held against each other from the top down:
    modules of equal structure first, then those of one class that hold modules of the same names.
    With a module, all below it moves. Both mappings have each module after those above it.
    """
    partner = {path: path for path in after if path in before}
    taken = set(partner)
    inside = _inside(path for path in after if path not in before)
    inside_before = _inside(path for path in before if path not in after)
    for exact in (True, False):
        candidates: defaultdict[Hashable, deque[str]] = defaultdict(deque)
        for path in inside_before:
            candidates[_key(before[path], inside_before[path], exact)].append(path)
        for path in inside:
            key = _key(after[path], inside[path], exact)
            if path in partner or key is None:
                continue
            waiting = candidates[key]
            while waiting and waiting[0] in taken:
                waiting.popleft()
            counterpart = waiting.popleft() if waiting else ""
            for rest in inside[path] if counterpart else ():
                below, old = path + rest, counterpart + rest
                if below not in partner and old in before and old not in taken:
                    partner[below] = old
                    taken.add(old)
    return partner


def _inside(paths: Iterable[str]) -> dict[str, list[str]]:
    """For each of some paths, the rests of those of them at or below it."""
    inside: dict[str, list[str]] = {path: [] for path in paths}
    for path in inside:
        for up in tags.ancestors(path):
            if up in inside:
                inside[up].append(path[len(up) :])
    return inside


def _key(state: ModuleState, inside: list[str], exact: bool) -> Hashable:
    """What two modules have in common that are one; None for a module that has too little to be recognised by."""
    if exact:
        return (state.structure, state.class_name) if state.nodes else None
    return (state.class_name, *sorted(inside)) if len(inside) > 1 and state.class_name else None
