"""Residual blocks that are removed: their input takes the place of their output."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.editing.edit import ROOT, Edit
from htp_export.editing.editing import remove_unused
from htp_export.errors import InputError
from htp_export.format.fates import Fate
from htp_export.format.signatures import Signature
from htp_export.model.tagged import TaggedModel

_PASSED = frozenset(
    (
        *(
            "Add",
            "LayerNormalization",
            "RMSNormalization",
            "SimplifiedLayerNormalization",
            "BatchNormalization",
        ),
        *("Relu", "Identity", "Cast", "Reshape", "Transpose", "Mul"),
    )
)
"""What lies between the input of a residual block and its output, beside the branches that are added."""


def remove_blocks(tagged: TaggedModel, paths: Sequence[str]) -> TaggedModel:
    """Remove residual blocks, none inside another, in place; the model is returned as it is read again."""
    had_nodes = [
        path
        for path, module in tagged.hierarchy.items()
        if module.fate.does_work and tagged[path].nodes
    ]
    now: dict[ir.Value, ir.Value] = {}
    for path in paths:
        taken, given = ends_of(tagged, path)
        now[given] = taken
    names: dict[str, str] = {}
    with Edit(tagged) as edit:
        for given, stands in now.items():
            while stands in now:
                stands = now[stands]
            names[str(given.name)] = str(stands.name)
            if given.is_graph_output():
                copy = edit.node("Identity", [stands], ROOT, f"{given.name}_removed")
                edit.graph.append(copy)
                edit.replace_uses(given, copy.outputs[0], (), f"{given.name}_before")
                names[str(copy.outputs[0].name)] = str(copy.outputs[0].name)
            given.replace_all_uses_with(stands)
        remove_unused(tagged.model)
        _describe(edit, paths, names, had_nodes)
    return tagged


def ends_of(tagged: TaggedModel, path: str) -> tuple[ir.Value, ir.Value]:
    """The input of a residual block that runs once, and its one output, whose place the input takes."""
    signature = tagged.signature(path)
    if not path or signature is None or tagged[path].calls != 1:
        raise InputError(
            f"module {path or '(root)'!r} cannot be removed: it is the whole model, or runs several times"
        )
    results = [
        value for name in signature.outputs if (value := tagged.values.get(name or "")) is not None
    ]
    leaving = [value for value in tagged[path].outputs if value not in results[:1]]
    if not results or leaving:
        listed = ", ".join(repr(value.name) for value in leaving)
        raise InputError(
            f"module {path!r} cannot be removed: it also gives {listed or 'no tensor of the graph'}"
        )
    given = results[0]
    shape, dtype = tagged.inferred.shape(given), tagged.inferred.dtype(given)
    around = _added(given, set(tagged[path].nodes))
    for name in signature.inputs.values():
        value = tagged.values.get(name or "")
        if value is None or value is given or value not in around:
            continue
        if tagged.inferred.shape(value) == shape and tagged.inferred.dtype(value) == dtype:
            return value, given
    raise InputError(
        f"module {path!r} is no residual block: its output {given.name!r} is not its input and what is added"
    )


def _added(given: ir.Value, inside: set[ir.Node]) -> set[ir.Value]:
    """The tensors that a block adds up to its output, and those that they were made of by normalisations."""
    found: set[ir.Value] = set()
    waiting = [given]
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        node = value.producer()
        if node is not None and node in inside and node.op_type in _PASSED and not node.domain:
            inputs = node.inputs if node.op_type in ("Add", "Mul") else node.inputs[:1]
            waiting += [each for each in inputs if each is not None]
    return found


def _describe(
    edit: Edit, paths: Sequence[str], names: dict[str, str], had_nodes: Sequence[str]
) -> None:
    """Record the fates and signatures of the modules that are gone."""
    tagged = edit.tagged.refresh()
    fates = dict.fromkeys((path for path in had_nodes if not tagged[path].nodes), Fate.DEAD)
    fates |= dict.fromkeys(paths, Fate.IDENTITY)
    edit.set_fates(fates)

    def present(name: str) -> str | None:
        name = names.get(name, name)
        return name if name in tagged.values else None

    edit.rename(present)
    for path in [path for path in edit.signatures if fates.get(path) == Fate.DEAD]:
        del edit.signatures[path]
    for path in paths:
        if path in edit.signatures:
            edit.signatures[path] = [
                Signature(call.inputs, call.outputs[:1]) for call in edit.signatures[path]
            ]
