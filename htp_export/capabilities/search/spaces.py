"""The space of a search: modules that are decided one by one, what each may become, and the plans of a decision."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import Part
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import Deciders
from htp_export.reporting.tables import drawn_levels, drawn_parents
from htp_export.weights.products import products_of

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.choosing import AutoPrecision
    from htp_export.capabilities.quantize.method import Precision

Space: TypeAlias = Mapping[str, Sequence[Any]] | Sequence[Any]
"""Selector → what modules may become; or what every module may become."""

Decision: TypeAlias = Mapping[str, str]
"""Module path → name of what it becomes."""


N = TypeVar("N", "ModuleChoice", "Precision")


@dataclass(frozen=True)
class ModuleChoice:
    """What a module may become: what ``prune`` removes of its weights, and what it is quantized to afterwards."""

    sparsity: Sparsity | None = None
    precision: Precision = field(default_factory=lambda: kept_precision())

    @property
    def name(self) -> str:
        """What is removed and the precision, as in ``2:4+int8``; one of them alone if there is no other."""
        if self.sparsity is None:
            return self.precision.name
        return str(self.sparsity) + (f"+{self.precision.name}" if self.is_quantized else "")

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
        """The choice as spaces write it: its name, or a mapping."""
        precision = _written(self.precision)
        if self.sparsity is None:
            return precision
        return (
            self.name if isinstance(precision, str) else {"prune": str(self.sparsity), **precision}
        )


def choice_of(value: Any) -> ModuleChoice:
    """Read a value of a space: a precision, a value of a plan for ``prune``, or both, as text with ``+`` or a mapping.

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
        choice = ModuleChoice(
            sparsity, precision_of(fields) if fields or removed is None else kept_precision()
        )
    elif isinstance(value, str):
        choice = _joined(value)
    else:
        choice = (
            ModuleChoice(None, value)
            if isinstance(value, Precision)
            else ModuleChoice(sparsity_of(value))
        )
    if choice.is_dropped and choice.is_quantized:
        raise InputError(
            f"choice {choice.name!r}: nothing is left to quantize of a module that is dropped"
        )
    return choice


def _joined(text: str) -> ModuleChoice:
    """A precision, a value for prune, or both."""
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
            raise InputError(
                f"there is no precision {part!r}; there are {', '.join(PRECISIONS)}, and {others}"
            )
    if len(precisions) > 1 or len(sparsities) > 1:
        raise InputError(
            f"choice {text!r}: write one value of prune and one precision, such as '2:4+int8'"
        )
    return ModuleChoice(next(iter(sparsities), None), next(iter(precisions), kept_precision()))


def kept_precision() -> Precision:
    """The precision of a module that is not quantized."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    return PRECISIONS["fp32"]


def _choices_of(values: Any, known: dict[str, ModuleChoice], serving: AutoPrecision) -> list[str]:
    """The names of several choices, which are added to those that are known."""
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    listed: Iterable[Any] = (
        [values] if isinstance(values, str | int | float | Precision | Mapping) else values
    )
    read = [choice_of(value) for value in listed]
    names = named_apart(
        (replace(each, precision=serving.precision(each.precision)) for each in read), known
    )
    if not names:
        raise InputError(
            f"give precisions to choose from, of {', '.join(PRECISIONS)}, or values of prune"
        )
    return names


def named_apart(choices: Iterable[N], known: dict[str, N]) -> list[str]:
    """The names of choices or precisions, which are added to those that are known; no two others have one name."""
    listed = list(choices)
    for each in listed:
        if known.setdefault(each.name, each) != each:
            problem = f"two precisions are named {each.name!r}; write one as 'int4:block_size=16'"
            raise InputError(f"{problem}, or give it a name of its own")
    return list(dict.fromkeys(each.name for each in listed))


def _written(precision: Precision) -> Any:
    """A precision as plans write it: its name, or a mapping with what differs."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    with contextlib.suppress(InputError):  # it may have a name of its own
        if precision_of(precision.name) == precision:
            return precision.name
    same = (each for each in PRECISIONS.values() if each.method == precision.method)
    base = PRECISIONS.get(precision.name) or next(same)
    fields = {
        key: value for key, value in vars(precision).items() if key not in ("bits", "options")
    }
    changed = {key: value for key, value in fields.items() if getattr(base, key) != value}
    return {"precision": base.name, **changed, **precision.options}


@dataclass(frozen=True)
class Treatment:
    """What is done to a model: selector → what ``prune`` removes, then selector → precision, also where they stay."""

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
        return removed, {selector: _written(value) for selector, value in self.quantize.items()}


@dataclass(frozen=True)
class SearchSpace:
    """Module path → names of what it may become; name → choice; and why choices were taken away, a line each."""

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
        return [
            path
            for path in paths
            if any(other != path and tags.is_under(other, path) for other in paths)
        ]

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


def read_space(
    tagged: TaggedModel,
    space: Space,
    select: str | Sequence[str] | None,
    depth: int | None,
    serving: AutoPrecision,
) -> SearchSpace:
    """The modules of a space and what they may become, as far as the graph allows it.

    ``select`` or ``depth`` say which modules, for choices alone; ``serving`` knows what ``auto``
    is.
    """
    choices: dict[str, ModuleChoice] = {}
    if not isinstance(space, Mapping):
        names = _choices_of(space, choices, serving)
        deciding = dict.fromkeys(tags.innermost(deciding_modules(tagged, select, depth)), "")
        found = dict.fromkeys(deciding, names)
    else:
        if select is not None or depth is not None:
            raise InputError("a space by selector says which modules; give no select or depth")
        if not space:
            raise InputError("the space is empty; give selectors and precisions")
        given = {
            selector: _choices_of(values, choices, serving) for selector, values in space.items()
        }
        last = {
            path: selector
            for selector in given
            for path in tags.innermost(deciding_modules(tagged, selector))
        }
        deciding = {path: last[path] for path in tagged if path in last}
        found = {path: given[selector] for path, selector in deciding.items()}
    stays = {
        name for name, choice in choices.items() if choice.is_dropped or choice == ModuleChoice()
    }
    frames = [path for path, names in found.items() if stays.issuperset(names)]
    whole = [path for path in found if path not in frames]
    for path in whole:  # else a weight would have two precisions
        above = next(
            (other for other in whole if other != path and tags.is_under(path, other)), None
        )
        if above is not None:
            raise InputError(f"module {path!r} lies in {above or '(root)'!r}; choose one of them")
    return _possible(
        tagged,
        SearchSpace({path: tuple(names) for path, names in found.items()}, choices),
        deciding,
    )


def _possible(tagged: TaggedModel, space: SearchSpace, deciding: Mapping[str, str]) -> SearchSpace:
    """The space without what the graph does not allow to prune; ``deciding``: module path → selector of its choices."""
    from htp_export.capabilities.prune.pruning import PlanChecks

    checks = PlanChecks(tagged)
    for selector, name in dict.fromkeys(
        (deciding[path], name) for path in deciding for name in space.variables[path]
    ):
        sparsity = space.choices[name].sparsity
        if sparsity is None:
            continue
        having = [
            path
            for path, names in space.variables.items()
            if deciding[path] == selector and name in names
        ]
        reasons = {path: checks.why_not(path, sparsity) for path in having}
        if all(reasons.values()):
            where = f" of {selector!r}" if selector else ""
            raise InputError(f"choice {name!r}{where}: {reasons[having[0]]}")
        for path, reason in reasons.items():
            if reason:
                space = space.without(path, name, reason)
    variables = space.variables.items()
    checks.check_coupled(
        {path: {space.choices[name].sparsity for name in names} for path, names in variables}
    )
    return space


def deciding_modules(
    tagged: TaggedModel, select: str | Sequence[str] | None = None, depth: int | None = None
) -> list[str]:
    """The modules whose precision is chosen one by one.

    Modules that own the same nodes, as a Conv and its BatchNorm, are one decision: the module that
    keeps the weight.

    ``select``: of these, those with weights. ``depth``: the modules at this level below the root,
    as ``tree`` draws it, and those above it that hold weights themselves. With neither, the
    innermost modules with weights.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> deciding_modules(htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)))
        ['0', '2']
    """
    tagged.require_tags()
    if select is not None and depth is not None:
        raise InputError("give select or depth, not both")
    deciding = _deciding_parts(tagged)
    holding = {part.call.path for parts in deciding for part in parts}
    if select is not None:
        around = {path for parts in deciding for part in parts for path in part.modules}
        found = [path for path in tagged.select(select) if path in around]
    elif depth is None:
        found = [path for path in tagged if path in holding]
    else:
        if depth < 0:
            raise InputError(f"depth counts levels from 0, not {depth}")
        modules = {path: content.facts for path, content in contents_of(tagged).modules.items()}
        levels = drawn_levels(drawn_parents(modules))
        above = {
            path: [up for up in tags.ancestors(path) if levels.get(up) == depth] for path in holding
        }
        at_depth = {ups[0] if ups else path for path, ups in above.items()}
        found = [path for path in tagged if path in at_depth]
    if not found:
        raise InputError("none of these modules has weights that can be quantized")
    return found


def _deciding_parts(tagged: TaggedModel) -> list[tuple[Part, ...]]:
    """For each node with weights, the parts of its work that decide; modules with the same nodes are one decision."""
    deciders = Deciders(tagged)
    weighted = dict.fromkeys(product.node for product in products_of(tagged, tagged.nodes))
    found = {node: deciders.of(node) for node in weighted}
    nodes: defaultdict[str, set[ir.Node]] = defaultdict(set)
    for node, parts in found.items():
        for part in parts:
            nodes[part.call.path].add(node)
    alike: dict[frozenset[ir.Node], str] = {}
    chosen = {alike.setdefault(frozenset(own), path) for path, own in nodes.items()}
    return [tuple(part for part in parts if part.call.path in chosen) for parts in found.values()]
