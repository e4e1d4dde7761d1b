"""Plans: ordered rules that give values to modules, and through them to nodes; read from files and command lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.files.json_file import read_json
from htp_export.files.yaml_file import read_yaml
from htp_export.format.hierarchy import Fate
from htp_export.format.selectors import select_below
from htp_export.model.tagged import TaggedModel

__all__ = ["Assigned", "assigned", "read_plan", "rules_of"]

V = TypeVar("V")


@dataclass(frozen=True)
class Assigned(Generic[V]):
    """The values that rules give to the modules and nodes of a model.

    Attributes:
        modules: Module path → its value, for the modules that a rule names, in the order of the model.
        nodes: Node → its value, for the nodes that have one, in the order of the model.
        named: Selector → the modules that it names, with those below them.
        disputed: The nodes of several modules whose values differ. They have none.
    """

    modules: Mapping[str, V]
    nodes: Mapping[ir.Node, V]
    named: Mapping[str, tuple[str, ...]]
    disputed: tuple[ir.Node, ...]


def assigned(tagged: TaggedModel, rules: Mapping[str, V]) -> Assigned[V]:
    """Give values to modules and nodes by rules.

    A rule holds for the modules that its selector names and for all modules below them; an excluded module takes those
    below it with it. Of several rules for one module, the last one holds.

    A node has the value of its owner. A node with several owners has a value only if all of them have it. An owner that
    no rule names and whose fate is ``fused`` is left out of account: a BatchNorm in a Conv has no tensor of its own.

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
        raise InputError("the plan has no rules; give selectors and values, as in {'encoder.layer.*': 'int8'}")
    tagged.require_tags()
    named = {selector: tuple(select_below(selector, tagged.hierarchy.classes)) for selector in rules}
    by_path = {path: value for selector, value in rules.items() for path in named[selector]}
    modules = {path: by_path[path] for path in tagged if path in by_path}
    nodes: dict[ir.Node, V] = {}
    disputed: list[ir.Node] = []
    for node in tagged.nodes:
        owners = tagged.owners_of(node)
        deciding = [path for path in owners if path in modules or tagged.hierarchy[path].fate != Fate.FUSED]
        values = [modules[path] for path in deciding if path in modules]
        if len(values) == len(deciding) > 0 and all(value == values[0] for value in values):
            nodes[node] = values[0]
        elif values:
            disputed.append(node)
    return Assigned(modules, nodes, named, tuple(disputed))


def rules_of(texts: Iterable[str], separator: str = "=") -> dict[str, str]:
    """Rules as they are typed: ``SELECTOR=VALUE``; of equal selectors, the last one holds, at its place.

    Raises:
        InputError: If a rule has no selector or no value.

    Examples:
        >>> rules_of(["encoder.**=int8", "lm_head=fp16"])
        {'encoder.**': 'int8', 'lm_head': 'fp16'}
    """
    rules: dict[str, str] = {}
    for text in texts:
        selector, found, value = text.rpartition(separator)  # a regular expression may hold the separator
        if not found or not selector.strip() or not value.strip():
            raise InputError(f"rule {text!r}: write SELECTOR{separator}VALUE, such as 'encoder.layer.*{separator}int8'")
        rules.pop(selector.strip(), None)
        rules[selector.strip()] = value.strip()
    return rules


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
        raise FileError(file, "holds no rules; write a mapping from selectors to values, such as 'lm_head: fp16'")
    return content
