"""Plans: ordered rules that give values to modules, and through them to nodes (docs/plans.md).

A rule holds for the regions of the modules that its selector names, except the excluded ones; it
holds for calls of modules separately. Nodes without owners belong to the root. A node whose modules
have different values is *disputed* and gets none; each capability decides about such nodes and
reports its decision.
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
    """The parts of a node's work, in execution order; a node without owners belongs to the root."""
    return tagged.index.works[node].parts or (_ROOT,)


class DecidingParts:
    """The parts of each node's work that determine its value in a plan.

    Args:
        tagged: The model.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged

    def of(self, node: ir.Node) -> tuple[Part, ...]:
        """The parts of a node's work that decide.

        Of modules that are merged into one node, only the first that keeps the weight decides.
        """
        parts = parts_of(self._tagged, node)
        if len(parts) > 1 and all(map(self._is_fused, parts)):
            return self._keepers(node, parts)[:1]
        return parts

    def candidates(
        self, node: ir.Node, rules: Mapping[Part, int | None]
    ) -> Iterator[Sequence[Part]]:
        """Yield sets of parts of which one has to agree on a node's rule, in order of preference.

        First all parts; then parts with a rule, and unfused ones; then owners of the weight.
        """
        yield tuple(rules)
        if len(rules) < 2:
            return
        yield [
            part for part, number in rules.items() if number is not None or not self._is_fused(part)
        ]
        if all(map(self._is_fused, rules)):
            yield self._keepers(node, tuple(rules))

    def _is_fused(self, part: Part) -> bool:
        return self._tagged.hierarchy[part.call.path].fate.is_merged

    @cached_property
    def _sources(self) -> WeightSources:
        return WeightSources(self._tagged)

    @cached_property
    def _places(self) -> ParameterPlaces:
        return ParameterPlaces(self._tagged, self._sources)

    def _keepers(self, node: ir.Node, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """The parts whose modules own the node's largest weight; all if its owner is unknown."""
        weights = [
            source.tensor
            for _, source in self._sources.read_by(node)
            if is_weight(source.tensor, node)
        ]
        if not weights:
            return parts
        paths = [part.call.path for part in parts]
        declared, merged = [], []
        for place in self._places.places.get(max(weights, key=elements_of), ()):
            parameter = self._places.declared[self._places.name_in(place.parameter, paths)]
            declared.append(parameter)
            merged.append("merged" in place.how)
        largest = max((math.prod(parameter.shape) for parameter in declared), default=0)
        # Of parameters that were merged into the weight, smaller ones are biases or scales.
        owners = {
            parameter.module
            for parameter, is_merged in zip(declared, merged, strict=True)
            if not is_merged or math.prod(parameter.shape) == largest
        }
        keepers = [part for part in parts if _contains_any(part.call.path, owners)]
        return tuple(keepers) or parts


V = TypeVar("V")


@dataclass(frozen=True)
class Assigned(Generic[V]):
    """The values that rules give to the modules and nodes of a model.

    Attributes:
        modules: Module path → value, in the model's order, for modules with the same value in all
            of their calls.
        nodes: Node → value, in the model's order, for nodes that have one.
        named: Selector → modules for which its rule holds in at least one call.
        disputed: Node whose modules have different values → module path → value.
        reached: Selector → nodes in the regions of its rule.
        deciding: Selector → the subset of these nodes where no later rule replaces it.
    """

    modules: Mapping[str, V]
    nodes: Mapping[ir.Node, V]
    named: Mapping[str, tuple[str, ...]]
    disputed: Mapping[ir.Node, Mapping[str, V]]
    reached: Mapping[str, Sequence[ir.Node]]
    deciding: Mapping[str, Sequence[ir.Node]]


def assigned(tagged: TaggedModel, rules: Mapping[str, V]) -> Assigned[V]:
    """Assign values to modules and nodes by rules; the last rule that holds determines the value.

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
    index = _Rules(tagged, list(rules))
    values = list(rules.values())
    named, modules = _of_modules(tagged, index, values)
    nodes: dict[ir.Node, V] = {}
    disputed: dict[ir.Node, Mapping[str, V]] = {}
    reached: list[list[ir.Node]] = [[] for _ in values]
    deciding: list[list[ir.Node]] = [[] for _ in values]
    deciding_parts = DecidingParts(tagged)
    for node in tagged.nodes:
        parts = parts_of(tagged, node)
        for number in set[int]().union(*map(index.holding, parts)):
            reached[number].append(node)
        rule_of = {part: index.deciding(part) for part in parts}
        chosen = {part: number for part, number in rule_of.items() if number is not None}
        if not chosen:
            continue
        for number in set(chosen.values()):
            deciding[number].append(node)
        agreed = None
        for candidates in deciding_parts.candidates(node, rule_of):
            agreed = _common([rule_of[part] for part in candidates], values)
            if agreed is not None:
                break
        if agreed is not None:
            nodes[node] = values[agreed]
        else:
            disputed[node] = {part.call.path: values[number] for part, number in chosen.items()}
    return Assigned(
        modules=modules,
        nodes=nodes,
        named=dict(zip(rules, named, strict=True)),
        disputed=disputed,
        reached=dict(zip(rules, reached, strict=True)),
        deciding=dict(zip(rules, deciding, strict=True)),
    )


def _of_modules(
    tagged: TaggedModel, index: _Rules, values: Sequence[V]
) -> tuple[list[tuple[str, ...]], dict[str, V]]:
    """For each rule, the modules for which it holds; and module path → value."""
    named: list[list[str]] = [[] for _ in values]
    modules: dict[str, V] = {}
    for path in tagged:
        calls = list(_calls_of(tagged, path))
        for number in set[int]().union(*map(index.holding, calls)):
            named[number].append(path)
        common = _common([index.deciding(part) for part in calls], values)
        if common is not None:
            modules[path] = values[common]
    return [tuple(paths) for paths in named], modules


def _common(numbers: Sequence[int | None], values: Sequence[V]) -> int | None:
    """The first of several rules if all have the same value; None if they differ."""
    first = numbers[0] if numbers else None
    if first is None:
        return None
    for number in numbers:
        if number is None or (number != first and values[number] != values[first]):
            return None
    return first


def modules_within(tagged: TaggedModel, selector: str | Sequence[str]) -> list[str]:
    """The modules that a selector names, their descendants, and the modules that they call.

    A module is included if this is true for at least one of its calls.

    Raises:
        SelectorError: If it cannot be read or matches no module.
        UntaggedModelError: If the model has no tags.
    """
    tagged.require_tags()
    index = _Rules(tagged, [selector])
    return [path for path in tagged if any(map(index.holding, _calls_of(tagged, path)))]


def _calls_of(tagged: TaggedModel, path: str) -> Iterator[Part]:
    """The calls of a module; for a module that never ran, one in the region of its path."""
    calls = tagged.hierarchy[path].calls
    for number in range(calls):
        yield from tagged.calls.of_calls((path,), [Instance(path, number)]).parts
    if not calls:
        yield Part(Instance(path), frozenset(), frozenset(tags.ancestors(path)))


class _Rules:
    """Index of rules, by their numbers: which of them hold for which call of a module."""

    def __init__(self, tagged: TaggedModel, selectors: Sequence[str | Sequence[str]]) -> None:
        self._calls = tagged.calls
        self._naming: defaultdict[str, set[int]] = defaultdict(set)
        self._excluding: defaultdict[str, set[int]] = defaultdict(set)
        self._known: dict[Instance, tuple[frozenset[int], int | None]] = {}
        classes = tagged.classes
        for number, selector in enumerate(selectors):
            chosen, excluded = chosen_and_excluded(selector, classes)
            for path in chosen:
                self._naming[path].add(number)
            for path in excluded:
                self._excluding[path].add(number)

    def holding(self, part: Part) -> frozenset[int]:
        """The rules that hold for a call: their regions contain it."""
        return self._of(part)[0]

    def deciding(self, part: Part) -> int | None:
        """The rule that holds and determines the value of a call."""
        return self._of(part)[1]

    def _of(self, part: Part) -> tuple[frozenset[int], int | None]:
        if part.call not in self._known:
            modules = part.modules | {""}
            naming = self._among(self._naming, modules)
            excluding = self._among(self._excluding, modules)
            holding = naming - excluding
            deciding = self._last(part, sorted(holding))
            self._known[part.call] = (frozenset(holding), deciding)
        return self._known[part.call]

    def _among(self, rules: Mapping[str, set[int]], modules: Iterable[str]) -> set[int]:
        return set().union(*(rules[path] for path in modules if path in rules))

    def _last(self, part: Part, holding: Sequence[int]) -> int | None:
        """The last rule that holds, unless an earlier one takes precedence."""
        steps = self._steps(part) if len(holding) > 1 else []
        deciding = holding[0] if holding else None
        for number in holding[1:]:
            if deciding is None or not self._takes_precedence(deciding, number, steps):
                deciding = number
        return deciding

    def _steps(self, part: Part) -> list[frozenset[str]]:
        """The modules around a call, innermost first, in groups.

        A new group begins where a caller is not an ancestor of the called module.
        """
        chain = self._calls.chain(part.call)
        regions = [frozenset({"", *part.modules})]
        for call, caller in pairwise(chain):
            if not tags.is_under(call.path, caller.path):
                around = self._calls.of_calls((), [caller]).parts[0].modules
                regions.append(frozenset({"", *around}))
        outer_regions = [*regions[1:], frozenset[str]()]
        return [inner - outer for inner, outer in zip(regions, outer_regions, strict=True)]

    def _takes_precedence(self, first: int, later: int, steps: Sequence[frozenset[str]]) -> bool:
        """Whether a rule overrides a later one.

        It does if it names a module that was called by a module of the later rule.
        """

        def named(rule: int, modules: Iterable[str]) -> list[str]:
            return [path for path in modules if rule in self._naming.get(path, ())]

        depth = 0
        for index, modules in enumerate(steps):
            if named(later, modules):
                depth = index
                break
        inside = frozenset[str]().union(*steps[:depth])
        around = frozenset[str]().union(*steps[depth:])
        if named(first, around):
            return False
        callers = named(later, around)
        return not all(tags.is_under_any(path, callers) for path in named(first, inside))


def _contains_any(path: str, descendants: Iterable[str]) -> bool:
    return any(tags.is_under(descendant, path) for descendant in descendants)


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a plan's rules from a YAML or JSON file: an ordered mapping from selector to value.

    Args:
        path: The file; ``.json`` for JSON, any other file is YAML.

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
