"""The subjects of the decisions of a search: modules, parts of them, and classes of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.model.tagged import TaggedModel

FLOAT = "float32"
"""The type of a part that stays."""


@dataclass(frozen=True)
class Target:
    """The modules that a decision is about, which all get the same choice.

    Attributes:
        paths: The modules.
        precision: For a part of them: the precision that the part belongs to; "" for whole modules.
        part: The part, such as ``weight``.
    """

    paths: tuple[str, ...]
    precision: str = ""
    part: str = ""

    def label(self, choice: str) -> str:
        """A choice without the name of the part: the same for all parts.

        Examples:
            >>> Target(("fc",), "fixed", "data").label("data=8.4"), Target(("fc",)).label("int8")
            ('8.4', 'int8')
        """
        return choice.removeprefix(f"{self.part}=") if self.part else choice


@dataclass(frozen=True)
class Parts:
    """The types of parts of a module, each chosen apart.

    Attributes:
        precision: The name of the precision, such as ``fixed``.
        choices: Part → name of a choice, such as ``weight=6.2`` → the precision with it alone.
    """

    precision: str
    choices: Mapping[str, Mapping[str, Precision]]


def parts_of(value: Any) -> Parts | None:
    """Parse choices by part: a precision whose fields have several values. None for other choices.

    Raises:
        InputError: The precision has no such parts, or a value is invalid.

    Examples:
        >>> parts = parts_of({"precision": "fixed", "weight": ["8.4", "6.2"], "data": "8.4"})
        >>> {part: list(names) for part, names in parts.choices.items()}
        {'weight': ['weight=8.4', 'weight=6.2'], 'data': ['data=8.4']}
    """
    from htp_export.capabilities.quantize.precisions import precision_of

    if not isinstance(value, Mapping) or not any(map(_is_several, value.values())):
        return None
    fields = dict(value)
    name = fields.pop("precision", None)
    known = precision_of(name).how.parts
    choices: dict[str, dict[str, Precision]] = {}
    for part, listed in fields.items():
        if part not in known:
            parts = f"precision {name!r} has no parts"
            if known:
                parts = f"the parts of {name!r} are {', '.join(known)}"
            raise InputError(
                f"{part!r} has several values, which are for parts that are chosen apart; {parts}: "
                "write several precisions instead"
            )
        values = listed if _is_several(listed) else [listed]
        if not values:
            raise InputError(f"part {part!r} of {name!r} has no values to choose from")
        choices[part] = {
            f"{part}={each}": precision_of_parts(name, {part: each}) for each in values
        }
    return Parts(str(name), choices)


def _is_several(value: Any) -> bool:
    return isinstance(value, list | tuple)


def precision_of_parts(name: str, values: Mapping[str, Any]) -> Precision:
    """The precision of a module with types of parts; the others stay.

    Examples:
        >>> precision_of_parts("fixed", {"weight": "6.2", "data": "8.4"}).name
        'fixed:data=8.4:weight=6.2:bias=float32'
        >>> precision_of_parts("fixed", {"weight": "float32"}).name
        'fp32'
    """
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    fields = dict.fromkeys(precision_of(name).how.parts, FLOAT) | dict(values)
    if set(fields.values()) == {FLOAT}:
        return PRECISIONS["fp32"]
    written = ":".join(f"{part}={value}" for part, value in fields.items())
    # The fields are not parsed from the text: a number instead of a text is refused.
    return precision_of({"precision": name, **fields, "name": f"{name}:{written}"})


def by_class(
    tagged: TaggedModel,
    variables: Mapping[str, Sequence[str]],
    targets: Mapping[str, Target],
    selectors: Mapping[str, str],
) -> tuple[dict[str, tuple[str, ...]], dict[str, Target]]:
    """One decision for all modules of a class: the variables and targets of `SearchSpace`.

    Modules of one class have a decision for each selector of a space. A choice that some of them
    cannot have is no choice of the class.

    Args:
        tagged: The model.
        variables: The choices of each module, or part of it.
        targets: The modules and parts that these are about.
        selectors: Module path → the selector of its choices.
    """
    groups: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key in variables:
        target = targets[key]
        [path] = target.paths
        name = tagged.hierarchy[path].simple_class or path or "."
        groups[name, selectors[path], target.part].append(key)
    joined: dict[str, tuple[str, ...]] = {}
    of_class: dict[str, Target] = {}
    for (name, selector, part), keys in groups.items():
        key = f"class:{name}" + (f":{part}" if part else "")
        if key in joined:
            key = f"{key} ({selector})"
        common = set(variables[keys[0]]).intersection(*(variables[other] for other in keys))
        joined[key] = tuple(choice for choice in variables[keys[0]] if choice in common)
        paths = tuple(targets[each].paths[0] for each in keys)
        of_class[key] = Target(paths, targets[keys[0]].precision, part)
    return joined, of_class
