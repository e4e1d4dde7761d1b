"""Plans: ordered rules that give values to modules, and through them to nodes (docs/plans.md).

A rule holds for the regions of the modules that its selector names, without those that it excludes,
call by call. Nodes without owners are the root's. What has no value because its modules have
different ones is *disputed*: what becomes of it, each capability decides, and says.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json, read_yaml
from htp_export.format import tags
from htp_export.format.call_tree import Instance, Part
from htp_export.format.selectors import chosen_and_excluded
from htp_export.model.module_facts import elements_of, is_weight
from htp_export.model.tagged import TaggedModel
from htp_export.weights.parameter_places import ParameterPlaces, WeightSources

_ROOT = Part(Instance(""), frozenset(), frozenset([""]))


def parts_of(tagged: TaggedModel, node: ir.Node) -> tuple[Part, ...]:
    """The parts of a node's work, in the order of execution; a node without owners is the root's."""
    return tagged.index.works[node].parts or (_ROOT,)


class Deciders:
    """Which of several modules have a say in what becomes of a node.

    Args:
        tagged: The model.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged

    def of(self, node: ir.Node) -> tuple[Part, ...]:
        """The parts of a node's work whose modules decide; of modules merged into it, that which keeps a weight."""
        parts = parts_of(self._tagged, node)
        return (
            self._keepers(node, parts)[:1]
            if len(parts) > 1 and all(map(self._is_fused, parts))
            else parts
        )

    def with_a_say(
        self, node: ir.Node, said: Mapping[Part, int | None]
    ) -> Iterator[Sequence[Part]]:
        """The parts that have to agree on a node; then, if they do not, fewer."""
        yield tuple(said)
        if len(said) > 1:
            yield [
                part
                for part, number in said.items()
                if number is not None or not self._is_fused(part)
            ]
            if all(map(self._is_fused, said)):
                yield self._keepers(node, tuple(said))

    def _is_fused(self, part: Part) -> bool:
        return self._tagged.hierarchy[part.call.path].fate.is_merged

    @cached_property
    def _sources(self) -> WeightSources:
        return WeightSources(self._tagged)

    @cached_property
    def _places(self) -> ParameterPlaces:
        return ParameterPlaces(self._tagged, self._sources)

    def _keepers(self, node: ir.Node, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """The parts whose modules hold the largest weight that a node reads; all if there is none, or none is known."""
        read = [
            source.tensor
            for _, source in self._sources.read_by(node)
            if is_weight(source.tensor, node)
        ]
        places = self._places.places.get(max(read, key=elements_of), ()) if read else ()
        owners = [part.call.path for part in parts]
        held = [
            (place, self._places.declared[self._places.name_in(place.parameter, owners)])
            for place in places
        ]
        most = max((math.prod(each.shape) for _, each in held), default=0)
        whole = {
            each.module
            for place, each in held
            if "merged" not in place.how or math.prod(each.shape) == most
        }
        return (
            tuple(
                part for part in parts if any(tags.is_under(path, part.call.path) for path in whole)
            )
            or parts
        )


V = TypeVar("V")


@dataclass(frozen=True)
class Assigned(Generic[V]):
    """The values that rules give to the modules and nodes of a model.

    Attributes:
        modules: Module path → its value, for the modules that have one in all of their calls, in
            the model's order.
        nodes: Node → its value, for the nodes that have one, in the order of the model.
        named: Selector → the modules for which its rule holds, in a call of them at least.
        disputed: Node of several modules whose values differ → module path → value, for those that
            have one.
        reached: Selector → the nodes in the regions of its rule.
        deciding: Selector → those of them for a module of which no other rule holds.
    """

    modules: Mapping[str, V]
    nodes: Mapping[ir.Node, V]
    named: Mapping[str, tuple[str, ...]]
    disputed: Mapping[ir.Node, Mapping[str, V]]
    reached: Mapping[str, Sequence[ir.Node]]
    deciding: Mapping[str, Sequence[ir.Node]]


def assigned(tagged: TaggedModel, rules: Mapping[str, V]) -> Assigned[V]:
    """Give values to modules and nodes by rules; of several, the last one holds.

    Args:
        tagged: The model.
        rules: Selector → value, in order.

    Raises:
        InputError: If there are no rules.
        SelectorError: If a selector cannot be read or matches no module.
        UntaggedModelError: If the model has no tags.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": "net.act"})
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> from htp_export.model.tagged import load
        >>> found = assigned(load(ir.Model(graph, ir_version=10)), {".": 8, "net": 4})
        >>> found.modules, list(found.nodes.values())
        ({'': 8, 'net': 4, 'net.act': 4}, [4])
    """
    if not rules:
        raise InputError(
            "the plan has no rules; give selectors and values, as in {'encoder.layer.*': 'int8'}"
        )
    tagged.require_tags()
    found, values = _Rules(tagged, list(rules)), list(rules.values())
    named, modules = _of_modules(tagged, found, values)
    nodes: dict[ir.Node, V] = {}
    disputed: dict[ir.Node, Mapping[str, V]] = {}
    reached: list[list[ir.Node]] = [[] for _ in values]
    deciding: list[list[ir.Node]] = [[] for _ in values]
    deciders = Deciders(tagged)
    for node in tagged.nodes:
        parts = parts_of(tagged, node)
        for number in {number for part in parts for number in found.holding(part)}:
            reached[number].append(node)
        said = {part: found.deciding(part) for part in parts}
        known = [number for number in said.values() if number is not None]
        for number in set(known):
            deciding[number].append(node)
        listed = deciders.with_a_say(node, said) if known else ()
        common = next(
            (
                n
                for each in listed
                if (n := _common([said[part] for part in each], values)) is not None
            ),
            None,
        )
        if common is not None:
            nodes[node] = values[common]
        elif known:
            disputed[node] = {
                part.call.path: values[n] for part, n in said.items() if n is not None
            }
    of_rules = [dict(zip(rules, each, strict=True)) for each in (reached, deciding)]
    return Assigned(modules, nodes, dict(zip(rules, named, strict=True)), disputed, *of_rules)


def _of_modules(
    tagged: TaggedModel, found: _Rules, values: Sequence[V]
) -> tuple[list[tuple[str, ...]], dict[str, V]]:
    """For each rule, the modules for which it holds; module path → its value."""
    named: list[list[str]] = [[] for _ in values]
    modules: dict[str, V] = {}
    for path in tagged:
        calls = list(_calls_of(tagged, path))
        for number in {number for part in calls for number in found.holding(part)}:
            named[number].append(path)
        common = _common([found.deciding(part) for part in calls], values)
        if common is not None:
            modules[path] = values[common]
    return [tuple(paths) for paths in named], modules


def _common(numbers: Sequence[int | None], values: Sequence[V]) -> int | None:
    """One of several rules, if all have the same value; None if there are others, or none."""
    first = numbers[0] if numbers else None
    if first is None or any(
        n is None or (n != first and values[n] != values[first]) for n in numbers
    ):
        return None
    return first


def modules_within(tagged: TaggedModel, selector: str | Sequence[str]) -> list[str]:
    """The modules that a selector names, with all modules below them and those that they call, in a call at least.

    Raises:
        SelectorError: If it cannot be read or matches no module.
        UntaggedModelError: If the model has no tags.
    """
    tagged.require_tags()
    found = _Rules(tagged, [selector])
    return [path for path in tagged if any(found.holding(part) for part in _calls_of(tagged, path))]


def _calls_of(tagged: TaggedModel, path: str) -> Iterator[Part]:
    """The calls of a module; one that never ran is where its path is."""
    calls = tagged.hierarchy[path].calls
    for number in range(calls):
        yield from tagged.calls.of_calls((path,), [Instance(path, number)]).parts
    if not calls:
        yield Part(Instance(path), frozenset(), frozenset(tags.ancestors(path)))


class _Rules:
    """Which rules hold for which calls of modules; rules are numbers."""

    def __init__(self, tagged: TaggedModel, selectors: Sequence[str | Sequence[str]]) -> None:
        self._calls = tagged.calls
        self._naming: defaultdict[str, set[int]] = defaultdict(set)
        self._excluding: defaultdict[str, set[int]] = defaultdict(set)
        self._known: dict[Instance, tuple[frozenset[int], int | None]] = {}
        classes = tagged.hierarchy.classes
        for number, selector in enumerate(selectors):
            chosen, excluded = chosen_and_excluded(selector, classes)
            for rules, paths in ((self._naming, chosen), (self._excluding, excluded)):
                for path in paths:
                    rules[path].add(number)

    def holding(self, part: Part) -> frozenset[int]:
        """The rules in whose regions a call is."""
        return self._of(part)[0]

    def deciding(self, part: Part) -> int | None:
        """Of these, the one that says what the call gets."""
        return self._of(part)[1]

    def _of(self, part: Part) -> tuple[frozenset[int], int | None]:
        if part.call not in self._known:
            modules = part.modules | {""}
            holding = self._among(self._naming, modules) - self._among(self._excluding, modules)
            self._known[part.call] = (frozenset(holding), self._last(part, sorted(holding)))
        return self._known[part.call]

    def _among(self, rules: Mapping[str, set[int]], modules: Iterable[str]) -> set[int]:
        return set().union(*(rules[path] for path in modules if path in rules))

    def _last(self, part: Part, holding: Sequence[int]) -> int | None:
        """The last rule, but for those that name callers alone of what a rule before them names."""
        steps = self._steps(part) if len(holding) > 1 else []
        found = holding[0] if holding else None
        for number in holding[1:]:
            if found is None or not self._stands(found, number, steps):
                found = number
        return found

    def _steps(self, part: Part) -> list[frozenset[str]]:
        """The modules of a call, from the innermost on, parted where a caller is not above what it called."""
        chain = self._calls.chain(part.call)
        foreign = [
            caller for call, caller in pairwise(chain) if not tags.is_under(call.path, caller.path)
        ]
        regions = [frozenset({"", *part.modules})]
        regions += [
            frozenset({"", *self._calls.of_calls((), [caller]).parts[0].modules})
            for caller in foreign
        ]
        return [
            inner - outer
            for inner, outer in zip(regions, [*regions[1:], frozenset[str]()], strict=True)
        ]

    def _stands(self, first: int, later: int, steps: Sequence[frozenset[str]]) -> bool:
        """Whether a rule holds against a later one: it names what was called by a module that the later one names."""

        def named(rule: int, modules: Iterable[str]) -> list[str]:
            return [path for path in modules if rule in self._naming.get(path, ())]

        at = next((place for place, modules in enumerate(steps) if named(later, modules)), 0)
        inside, around = frozenset[str]().union(*steps[:at]), frozenset[str]().union(*steps[at:])
        others = named(later, around)
        mine = [] if named(first, around) else named(first, inside)
        return any(not any(tags.is_under(path, other) for other in others) for path in mine)


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the rules of a plan from a YAML or JSON file: a mapping from selectors to values, in order.

    Args:
        path: The file; ``.json`` for JSON, anything else is YAML.

    Raises:
        FileError: If it cannot be read, is no mapping, or names a selector twice.
    """
    file = Path(path)
    content = read_json(file) if file.suffix.lower() == ".json" else read_yaml(file)
    if not isinstance(content, dict) or not content:
        raise FileError(
            file,
            "holds no rules; write a mapping from selectors to values, such as 'lm_head: fp16'",
        )
    return content
