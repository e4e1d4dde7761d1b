"""The space of a search: the modules that are decided one by one, what each may become, and the plans of a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from htp_export.capabilities.search.choices import ModuleChoice, choices_of, written_precision
from htp_export.capabilities.search.decisions import check_apart, deciding_modules
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.tagged import TaggedModel

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.precisions import Precision

__all__ = ["Decision", "SearchSpace", "Space", "Treatment", "read_space"]

Space: TypeAlias = Mapping[str, Sequence[Any]] | Sequence[Any]
"""Selector → what modules may become; or what every module may become."""


Decision: TypeAlias = Mapping[str, str]
"""Module path → name of what it becomes."""


@dataclass(frozen=True)
class Treatment:
    """What is done to a model: a plan for ``prune``, and afterwards one for ``quantize``.

    Attributes:
        prune: Selector → what is removed.
        quantize: Selector → precision; modules that stay as they are, too.
    """

    prune: Mapping[str, Sparsity]
    quantize: Mapping[str, Precision]

    @property
    def changes_nothing(self) -> bool:
        """Whether all modules stay as they are."""
        return not self.prune and all(value.is_kept for value in self.quantize.values())

    @property
    def written(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Both plans as files have them."""
        removed = {selector: str(value) for selector, value in self.prune.items()}
        return removed, {selector: written_precision(value) for selector, value in self.quantize.items()}


@dataclass(frozen=True)
class SearchSpace:
    """What modules may become.

    Attributes:
        variables: Module path → names of choices.
        choices: Name → choice.
        problems: Why modules cannot have choices that were taken away, a line each.
    """

    variables: Mapping[str, Sequence[str]]
    choices: Mapping[str, ModuleChoice]
    problems: tuple[str, ...] = field(default=())

    @property
    def written(self) -> dict[str, Any]:
        """Name → choice as plain data."""
        return {name: choice.written for name, choice in self.choices.items()}

    @property
    def frames(self) -> list[str]:
        """The modules that are dropped or stay, and that have modules inside which are decided, too."""
        paths = list(self.variables)
        return [path for path in paths if any(other != path and tags.is_under(other, path) for other in paths)]

    def without(self, path: str, name: str, reason: object) -> SearchSpace:
        """The space in which a module does not have a choice."""
        left = tuple(other for other in self.variables[path] if other != name)
        problem = f"{path or '(root)'} in {name}: {reason}"
        return SearchSpace({**self.variables, path: left}, self.choices, (*self.problems, problem))

    def completed(self) -> SearchSpace:
        """The space in which modules that can have none of their choices stay as they are."""
        stays = ModuleChoice()
        variables = {path: names or (stays.name,) for path, names in self.variables.items()}
        return SearchSpace(variables, {stays.name: stays, **self.choices}, self.problems)

    def treatment(self, decision: Decision) -> Treatment:
        """The plans of a decision; modules inside a dropped one are in neither."""
        chosen = {path: self.choices.get(name) or ModuleChoice() for path, name in decision.items()}
        dropped = [path for path, choice in chosen.items() if choice.is_dropped]
        frames = set(self.frames)
        removed: dict[str, Sparsity] = {}
        precisions: dict[str, Precision] = {}
        for path, choice in chosen.items():
            if any(other != path and tags.is_under(path, other) for other in dropped):
                continue
            if choice.sparsity is not None:
                removed[path or "."] = choice.sparsity
            if path not in frames and not choice.is_dropped:
                precisions[path or "."] = choice.precision
        return Treatment(removed, precisions)


def read_space(tagged: TaggedModel, space: Space, select: str | Sequence[str] | None, depth: int | None) -> SearchSpace:
    """The modules of a space and what they may become, as far as the graph allows it.

    Args:
        tagged: The model, without functions.
        space: The space.
        select: For choices alone: the modules.
        depth: For choices alone: the level of the modules.

    Raises:
        InputError: If a choice cannot be read, no module can have it, or modules with precisions lie in each other.
        SelectorError: If a selector cannot be read or matches no module.
    """
    choices: dict[str, ModuleChoice] = {}
    if not isinstance(space, Mapping):
        names = choices_of(space, choices)
        deciding = dict.fromkeys(tags.innermost(deciding_modules(tagged, select, depth)), "")
        found = dict.fromkeys(deciding, names)
    else:
        if select is not None or depth is not None:
            raise InputError("a space by selector says which modules; give no select or depth")
        if not space:
            raise InputError("the space is empty; give selectors and precisions")
        given = {selector: choices_of(values, choices) for selector, values in space.items()}
        last = {path: selector for selector in given for path in tags.innermost(deciding_modules(tagged, selector))}
        deciding = {path: last[path] for path in tagged if path in last}
        found = {path: given[selector] for path, selector in deciding.items()}
    frames = [path for path, names in found.items() if all(_drops_or_stays(choices[name]) for name in names)]
    check_apart([path for path in found if path not in frames])
    return _possible(tagged, SearchSpace({path: tuple(names) for path, names in found.items()}, choices), deciding)


def _drops_or_stays(choice: ModuleChoice) -> bool:
    return choice.is_dropped or choice.changes_nothing


def _possible(tagged: TaggedModel, space: SearchSpace, deciding: Mapping[str, str]) -> SearchSpace:
    """The space without what the graph does not allow to prune.

    Args:
        tagged: The model.
        space: The space.
        deciding: Module path → the selector that gave it its choices.
    """
    from htp_export.capabilities.prune.checking import PlanChecks

    checks = PlanChecks(tagged)
    for selector, name in dict.fromkeys((deciding[path], name) for path in deciding for name in space.variables[path]):
        sparsity = space.choices[name].sparsity
        if sparsity is None:
            continue
        having = [path for path, names in space.variables.items() if deciding[path] == selector and name in names]
        reasons = {path: checks.why_not(path, sparsity) for path in having}
        if all(reasons.values()):
            where = f" of {selector!r}" if selector else ""
            raise InputError(f"choice {name!r}{where}: {reasons[having[0]]}")
        for path, reason in reasons.items():
            if reason:
                space = space.without(path, name, reason)
    pruned = {
        path: {sparsity for name in names if (sparsity := space.choices[name].sparsity) is not None}
        for path, names in space.variables.items()
    }
    checks.check_coupled(pruned)
    return space
