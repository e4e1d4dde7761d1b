"""The space of a search: its modules, the choices of each, and the plans of a decision."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import onnx_ir as ir

from htp_export.capabilities.search.decisions import (
    FLOAT,
    Parts,
    Target,
    by_class,
    parts_of,
    precision_of_parts,
)
from htp_export.errors import InputError, unknown_name
from htp_export.format import tags
from htp_export.format.call_tree import Part
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import DecidingParts
from htp_export.reporting.tables import drawn_levels, drawn_parents
from htp_export.weights.products import products_of

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.choosing import AutoPrecision
    from htp_export.capabilities.quantize.method import Precision

Space: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""Selector → choices of its modules; or the choices of all modules."""

By: TypeAlias = Literal["module", "class"]
"""Whether each module has a choice of its own, or all modules of a class have the same."""

Decision: TypeAlias = Mapping[str, str]
"""Key of a variable, such as a module path → name of its choice."""


N = TypeVar("N", "ModuleChoice", "Precision")


@dataclass(frozen=True)
class ModuleChoice:
    """A choice for a module: a sparsity for ``prune``, then a precision for ``quantize``."""

    sparsity: Sparsity | None = None
    precision: Precision = field(default_factory=lambda: kept_precision())

    @property
    def name(self) -> str:
        """The sparsity and the precision, as in ``2:4+int8``; or one of them alone."""
        if self.sparsity is None:
            return self.precision.name
        if not self.is_quantized:
            return str(self.sparsity)
        return f"{self.sparsity}+{self.precision.name}"

    def resolved(self, auto: AutoPrecision) -> ModuleChoice:
        """The choice in which the precision ``auto`` is replaced."""
        return replace(self, precision=auto.precision(self.precision))

    @property
    def is_quantized(self) -> bool:
        """Whether the precision changes anything."""
        return not self.precision.is_kept

    @property
    def is_dropped(self) -> bool:
        """Whether the module is removed."""
        return self.sparsity is not None and self.sparsity.kind == "blocks"

    @property
    def written(self) -> Any:
        """The choice as in the file of a space: its name, or a mapping."""
        precision = _written(self.precision)
        if self.sparsity is None:
            return precision
        if isinstance(precision, str):
            return self.name
        return {"prune": str(self.sparsity), **precision}


def choice_of(value: Any) -> ModuleChoice:
    """Parse a choice: a precision, a value for ``prune``, or both, as text or a mapping.

    Examples:
        >>> [choice_of(value).name for value in ("int8", 0.5, "2:4+int8", {"prune": "rank:25%", "precision": "int4"})]
        ['int8', '0.5', '2:4+int8', 'rank:25%+int4']
    """
    from htp_export.capabilities.prune.sparsities import sparsity_of
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.precisions import precision_of

    if isinstance(value, Mapping):
        fields = dict(value)
        removed = fields.pop("prune", None)
        sparsity = None if removed is None else sparsity_of(removed)
        only_pruned = removed is not None and not fields
        choice = ModuleChoice(sparsity, kept_precision() if only_pruned else precision_of(fields))
    elif isinstance(value, str):
        choice = _joined(value)
    elif isinstance(value, Precision):
        choice = ModuleChoice(None, value)
    else:
        choice = ModuleChoice(sparsity_of(value))
    if choice.is_dropped and choice.is_quantized:
        raise InputError(
            f"choice {choice.name!r}: nothing is left to quantize of a module that is dropped"
        )
    return choice


def _joined(text: str) -> ModuleChoice:
    """Parse a precision, a value for prune, or both with ``+``."""
    from htp_export.capabilities.prune.sparsities import sparsity_of
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    precisions, sparsities = [], []
    for part in map(str.strip, text.split("+")):
        if part.partition(":")[0] in PRECISIONS:
            precisions.append(precision_of(part))
        elif part == "drop" or ":" in part or part.replace(".", "", 1).isdecimal():
            sparsities.append(sparsity_of(part))
        else:
            others = "values of prune such as 0.5, 2:4, channels:0.25, rank:25% and drop"
            raise InputError(f"there is no precision {unknown_name(part, [*PRECISIONS, others])}")
    if len(precisions) > 1 or len(sparsities) > 1:
        raise InputError(
            f"choice {text!r}: write one value of prune and one precision, such as '2:4+int8'"
        )
    return ModuleChoice(next(iter(sparsities), None), next(iter(precisions), kept_precision()))


def kept_precision() -> Precision:
    """The precision of a module that is not quantized."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    return PRECISIONS["fp32"]


def _choices_of(values: Any, known: dict[str, ModuleChoice], auto: AutoPrecision) -> list[str]:
    """Parse one or several choices, add them to ``known``, and return their names."""
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    is_single = isinstance(values, str | int | float | Precision | Mapping)
    choices = [choice_of(value) for value in ([values] if is_single else values)]
    names = named_apart([choice.resolved(auto) for choice in choices], known)
    if not names:
        raise InputError(
            f"give precisions to choose from, of {', '.join(PRECISIONS)}, or values of prune"
        )
    return names


def named_apart(choices: Iterable[N], known: dict[str, N]) -> list[str]:
    """Add choices or precisions to ``known``, and return their names.

    Raises:
        InputError: Two different ones have the same name.
    """
    names: dict[str, None] = {}
    for choice in choices:
        if known.setdefault(choice.name, choice) != choice:
            problem = f"two precisions are named {choice.name!r}; write one as 'int4:block_size=16'"
            raise InputError(f"{problem}, or give it a name of its own")
        names[choice.name] = None
    return list(names)


def _written(precision: Precision) -> Any:
    """A precision as in a plan: its name, or a mapping with the fields that differ."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    with contextlib.suppress(InputError):  # it may have a name of its own
        if precision_of(precision.name) == precision:
            return precision.name
    same_method = (named for named in PRECISIONS.values() if named.method == precision.method)
    base = PRECISIONS.get(precision.name) or next(same_method)
    fields = {
        key: value for key, value in vars(precision).items() if key not in ("bits", "options")
    }
    changed = {key: value for key, value in fields.items() if getattr(base, key) != value}
    return {"precision": base.name, **changed, **precision.options}


@dataclass(frozen=True)
class Treatment:
    """The plans of a decision: selector → sparsity for ``prune``, then selector → precision."""

    prune: Mapping[str, Sparsity]
    quantize: Mapping[str, Precision]

    @property
    def changes_nothing(self) -> bool:
        """Whether all modules stay as they are."""
        return not self.prune and all(value.is_kept for value in self.quantize.values())

    @property
    def written(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Both plans as plain data, as in files."""
        removed = {selector: str(value) for selector, value in self.prune.items()}
        return removed, {selector: _written(value) for selector, value in self.quantize.items()}


@dataclass(frozen=True)
class SearchSpace:
    """The modules of a search and their choices.

    Attributes:
        variables: Key of a variable → names of its choices. The key is the path of a module;
            ``fc:weight`` of a part of it, ``class:Linear`` of all modules of a class.
        choices: Name → choice.
        targets: Key of a variable → the modules, and the part of them, that it is about.
        problems: The reasons why choices were removed, a line each.
    """

    variables: Mapping[str, Sequence[str]]
    choices: Mapping[str, ModuleChoice]
    targets: Mapping[str, Target]
    problems: tuple[str, ...] = field(default=())

    @property
    def written(self) -> dict[str, Any]:
        """Name → choice as plain data."""
        return {name: choice.written for name, choice in self.choices.items()}

    @property
    def frames(self) -> list[str]:
        """The modules that contain other modules of the space: they are dropped or stay."""
        paths = list(self.variables)
        return [path for path in paths if _has_modules_inside(path, paths)]

    def without(self, path: str, name: str, reason: object) -> SearchSpace:
        """The space without one choice of a module."""
        left = tuple(other for other in self.variables[path] if other != name)
        problem = f"{path or '(root)'} in {name}: {reason}"
        variables = {**self.variables, path: left}
        return replace(self, variables=variables, problems=(*self.problems, problem))

    def completed(self) -> SearchSpace:
        """The space in which modules without choices stay as they are."""
        stays = ModuleChoice()
        variables = {path: names or (stays.name,) for path, names in self.variables.items()}
        return replace(self, variables=variables, choices={stays.name: stays, **self.choices})

    def uniform(self) -> dict[str, Decision]:
        """Name of a choice → the decision in which all modules and parts have it; frames stay."""
        frames = set(self.frames)
        decisions: dict[str, dict[str, str]] = {}
        for key, names in self.variables.items():
            for name in names:
                decisions.setdefault(self.targets[key].label(name), {})[key] = name
        stays = dict.fromkeys(frames, kept_precision().name)
        uniform: dict[str, Decision] = {}
        for label, decision in decisions.items():
            plan = {**decision, **stays}
            complete = {key: plan[key] for key in self.variables if key in plan}
            if all(complete.get(key) in names for key, names in self.variables.items()):
                uniform[label] = complete
        return uniform

    def whole(self, label: str) -> ModuleChoice:
        """The choice of the whole model with a label of `uniform`."""
        if label in self.choices:
            return self.choices[label]
        target = next(target for target in self.targets.values() if target.part)
        parts = [other.part for other in self.targets.values() if other.part]
        return ModuleChoice(None, precision_of_parts(target.precision, dict.fromkeys(parts, label)))

    def treatment(self, decision: Decision) -> Treatment:
        """The plans of a decision, without the modules inside dropped ones."""
        chosen = self._chosen(decision)
        dropped = [path for path, choice in chosen.items() if choice.is_dropped]
        frames = set(self.frames)
        removed: dict[str, Sparsity] = {}
        precisions: dict[str, Precision] = {}
        for path, choice in chosen.items():
            if _module_around(path, dropped) is not None:
                continue
            if choice.sparsity is not None:
                removed[path or "."] = choice.sparsity
            # The precision of a frame would apply to the modules inside, too.
            if path not in frames and not choice.is_dropped:
                precisions[path or "."] = choice.precision
        return Treatment(removed, precisions)

    def _chosen(self, decision: Decision) -> dict[str, ModuleChoice]:
        """Module path → its choice."""
        chosen: dict[str, ModuleChoice] = {}
        parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
        precisions: dict[str, str] = {}
        for key, name in decision.items():
            target = self.targets[key]
            choice = self.choices.get(name) or ModuleChoice()
            for path in target.paths:
                if not target.part:
                    chosen[path] = choice
                    continue
                value = target.label(name) if choice.is_quantized else FLOAT
                parts[path][target.part] = value
                precisions[path] = target.precision
        for path, values in parts.items():
            chosen[path] = ModuleChoice(None, precision_of_parts(precisions[path], values))
        return chosen


def _has_modules_inside(path: str, paths: Iterable[str]) -> bool:
    return any(other != path and tags.is_under(other, path) for other in paths)


def _module_around(path: str, paths: Iterable[str]) -> str | None:
    """The first of other modules that contains a module; None if none does."""
    return next((other for other in paths if other != path and tags.is_under(path, other)), None)


def read_space(
    tagged: TaggedModel,
    space: Space,
    select: str | Sequence[str] | None,
    depth: int | None,
    auto: AutoPrecision,
    by: By = "module",
) -> SearchSpace:
    """The modules of a space and their choices, as far as the graph allows them.

    Args:
        tagged: The model.
        space: The choices of all modules, or by selector.
        select: For the former: the modules.
        depth: For the former: the level of the modules.
        auto: Replaces the precision ``auto``.
        by: Whether each module is decided, or each class of modules.
    """
    if by not in ("module", "class"):
        raise InputError(f"by is {by!r}: there are 'module' and 'class'")
    if isinstance(space, Mapping):
        if select is not None or depth is not None:
            raise InputError("a space by selector says which modules; give no select or depth")
        if not space:
            raise InputError("the space is empty; give selectors and precisions")
        selectors = _last_selectors(tagged, space)
    else:
        paths = tags.innermost(deciding_modules(tagged, select, depth))
        selectors = dict.fromkeys(paths, "")
        space = {"": space}
    choices: dict[str, ModuleChoice] = {}
    parts_by_selector: dict[str, Parts] = {}
    names_by_selector: dict[str, list[str]] = {}
    for selector, values in space.items():
        parts = parts_of(values)
        if parts is None:
            names_by_selector[selector] = _choices_of(values, choices, auto)
        else:
            parts_by_selector[selector] = parts
    whole = {path: each for path, each in selectors.items() if each in names_by_selector}
    variables = {path: tuple(names_by_selector[each]) for path, each in whole.items()}
    _check_nesting(variables, choices, [path for path in selectors if path not in whole])
    targets = {path: Target((path,)) for path in variables}
    found = _prunable(tagged, SearchSpace(variables, choices, targets), whole)
    found = _with_parts(
        found, {path: parts_by_selector.get(each) for path, each in selectors.items()}
    )
    if by == "module":
        return found
    if found.frames:
        raise InputError("by class: modules of the space lie in others; decide them by module")
    grouped, of_class = by_class(tagged, found.variables, found.targets, selectors)
    return replace(found, variables=grouped, targets=of_class)


def _with_parts(space: SearchSpace, parts: Mapping[str, Parts | None]) -> SearchSpace:
    """Add the variables of parts of modules, in the order of the modules."""
    variables: dict[str, Sequence[str]] = {}
    targets: dict[str, Target] = {}
    choices = dict(space.choices)
    for path, of_module in parts.items():
        if of_module is None:
            variables[path], targets[path] = space.variables[path], space.targets[path]
            continue
        for part, precisions in of_module.choices.items():
            key = f"{path or '.'}:{part}"
            variables[key] = tuple(precisions)
            targets[key] = Target((path,), of_module.precision, part)
            for name, precision in precisions.items():
                choices[name] = ModuleChoice(None, precision)
    return replace(space, variables=variables, choices=choices, targets=targets)


def _check_nesting(
    names_of: Mapping[str, Sequence[str]],
    choices: Mapping[str, ModuleChoice],
    others: Sequence[str] = (),
) -> None:
    """Raise an `InputError` for modules inside each other: a weight would have two choices.

    Modules that are only dropped or stay may contain others; ``others`` are changed, too.
    """
    harmless = {
        name for name, choice in choices.items() if choice.is_dropped or choice == ModuleChoice()
    }
    changing = [path for path, names in names_of.items() if not harmless.issuperset(names)]
    changing += others
    for path in changing:
        around = _module_around(path, changing)
        if around is not None:
            raise InputError(f"module {path!r} lies in {around or '(root)'!r}; choose one of them")


def _prunable(tagged: TaggedModel, space: SearchSpace, selectors: Mapping[str, str]) -> SearchSpace:
    """Remove choices that the graph does not allow to prune; ``selectors``: module → its selector.

    A choice that no module of its selector allows is an `InputError`.
    """
    from htp_export.capabilities.prune.pruning import PlanChecks

    checks = PlanChecks(tagged)
    having: dict[tuple[str, str], list[str]] = {}  # selector and choice → its modules
    for path, selector in selectors.items():
        for name in space.variables[path]:
            having.setdefault((selector, name), []).append(path)
    for (selector, name), paths in having.items():
        sparsity = space.choices[name].sparsity
        if sparsity is None:
            continue
        reasons = {path: checks.why_not(path, sparsity) for path in paths}
        if all(reasons.values()):
            where = f" of {selector!r}" if selector else ""
            raise InputError(f"choice {name!r}{where}: {reasons[paths[0]]}")
        for path, reason in reasons.items():
            if reason:
                space = space.without(path, name, reason)
    sparsities: dict[str, set[Sparsity | None]] = {}
    for path, names in space.variables.items():
        sparsities[path] = {space.choices[name].sparsity for name in names}
    checks.check_coupled(sparsities)
    return space


def _last_selectors(tagged: TaggedModel, selectors: Iterable[str]) -> dict[str, str]:
    """Module → the last selector that chooses it, in the order of the modules."""
    last: dict[str, str] = {}
    for selector in selectors:
        paths = tags.innermost(deciding_modules(tagged, selector))
        last |= dict.fromkeys(paths, selector)
    return {path: last[path] for path in tagged if path in last}


def deciding_modules(
    tagged: TaggedModel, select: str | Sequence[str] | None = None, depth: int | None = None
) -> list[str]:
    """The modules with weights whose precision is chosen one by one.

    Of modules that own the same nodes, as a Conv and its BatchNorm, only the module that keeps the
    weight is included.

    Args:
        tagged: The model.
        select: Modules among which these are chosen.
        depth: The level below the root, as in ``tree``: modules at this level, and modules above it
            with weights of their own. With neither, the innermost modules with weights.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> deciding_modules(htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)))
        ['0', '2']
    """
    tagged.require_tags()
    if select is not None and depth is not None:
        raise InputError("give select or depth, not both")
    if depth is not None and depth < 0:
        raise InputError(f"depth counts levels from 0, not {depth}")
    innermost: set[str] = set()
    around: set[str] = set()  # these, and the modules above them that run them
    for parts in _deciding_parts(tagged):
        for part in parts:
            innermost.add(part.call.path)
            around.update(part.modules)
    if select is not None:
        paths = [path for path in tagged.select(select) if path in around]
    else:
        chosen = innermost if depth is None else _at_depth(tagged, innermost, depth)
        paths = [path for path in tagged if path in chosen]
    if not paths:
        raise InputError("none of these modules has weights that can be quantized")
    return paths


def _at_depth(tagged: TaggedModel, paths: Iterable[str], depth: int) -> set[str]:
    """The modules at a level around each of the modules; a module above the level itself."""
    modules = {path: content.facts for path, content in contents_of(tagged).modules.items()}
    levels = drawn_levels(drawn_parents(modules))
    at_depth: set[str] = set()
    for path in paths:
        above = (up for up in tags.ancestors(path) if levels.get(up) == depth)
        at_depth.add(next(above, path))
    return at_depth


def _deciding_parts(tagged: TaggedModel) -> list[tuple[Part, ...]]:
    """For each node with weights, the calls that decide; of equal modules, the first."""
    deciding_parts = DecidingParts(tagged)
    weighted = dict.fromkeys(product.node for product in products_of(tagged, tagged.nodes))
    parts_of = {node: deciding_parts.of(node) for node in weighted}
    nodes_of: defaultdict[str, set[ir.Node]] = defaultdict(set)
    for node, parts in parts_of.items():
        for part in parts:
            nodes_of[part.call.path].add(node)
    first_with: dict[frozenset[ir.Node], str] = {}
    for path, nodes in nodes_of.items():
        first_with.setdefault(frozenset(nodes), path)
    chosen = set(first_with.values())
    return [_parts_at(chosen, parts) for parts in parts_of.values()]


def _parts_at(paths: Container[str], parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.call.path in paths)
