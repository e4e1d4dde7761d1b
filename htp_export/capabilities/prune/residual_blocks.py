"""Removal of residual blocks: the input of a block replaces its output."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.editing.edit import ROOT, Edit
from htp_export.editing.editing import remove_unused
from htp_export.errors import InputError
from htp_export.format.fates import Fate
from htp_export.format.signatures import Signature
from htp_export.model.neighbours import reached
from htp_export.model.tagged import TaggedModel

_PASSED = frozenset(
    (
        "Add",
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "BatchNormalization",
        "Relu",
        "Identity",
        "Cast",
        "Reshape",
        "Transpose",
        "Mul",
    )
)
"""Operators between the input of a residual block and its output, outside the added branches."""


def remove_blocks(tagged: TaggedModel, paths: Sequence[str]) -> TaggedModel:
    """Remove residual blocks, none inside another, in place, and return the model."""
    had_nodes: list[str] = []
    for path, module in tagged.hierarchy.items():
        if module.fate.does_work and tagged[path].nodes:
            had_nodes.append(path)
    replacements: dict[ir.Value, ir.Value] = {}
    for path in paths:
        source, result = ends_of(tagged, path)
        replacements[result] = source
    names: dict[str, str] = {}
    with Edit(tagged) as edit:
        for result, source in replacements.items():
            while source in replacements:  # the output of another block that is removed
                source = replacements[source]
            names[str(result.name)] = str(source.name)
            if result.is_graph_output():
                copy = edit.node("Identity", [source], ROOT, f"{result.name}_removed")
                edit.graph.append(copy)
                edit.replace_uses(result, copy.outputs[0], (), f"{result.name}_before")
                names[str(copy.outputs[0].name)] = str(copy.outputs[0].name)
            result.replace_all_uses_with(source)
        remove_unused(tagged.model)
        _describe(edit, paths, names, had_nodes)
    return tagged


def ends_of(tagged: TaggedModel, path: str) -> tuple[ir.Value, ir.Value]:
    """The input of a residual block that runs once, and its one output.

    Raises:
        InputError: The module is no residual block, has several outputs, or runs several times.
    """
    signature = tagged.signature(path)
    if not path or signature is None or tagged[path].calls != 1:
        name = repr(path or "(root)")
        raise InputError(
            f"module {name} cannot be removed: it is the whole model, or runs several times"
        )
    result = _only_output(tagged, path, signature)
    inferred = tagged.inferred
    summands = _summands(result, set(tagged[path].nodes))
    for argument in signature.inputs.values():
        value = tagged.values.get(argument or "")
        if value is None or value is result or value not in summands:
            continue
        has_shape = inferred.shape(value) == inferred.shape(result)
        if has_shape and inferred.dtype(value) == inferred.dtype(result):
            return value, result
    raise InputError(
        f"module {path!r} is no residual block: its output {result.name!r} "
        "is not its input plus a branch"
    )


def _only_output(tagged: TaggedModel, path: str, signature: Signature) -> ir.Value:
    """The output of a module whose nodes compute no other output; an `InputError` otherwise."""
    results = [tagged.values[name] for name in signature.outputs if name and name in tagged.values]
    other_outputs = [value for value in tagged[path].outputs if value not in results[:1]]
    if results and not other_outputs:
        return results[0]
    listed = ", ".join(repr(value.name) for value in other_outputs)
    raise InputError(
        f"module {path!r} cannot be removed: it also returns {listed or 'no tensor of the graph'}"
    )


def _summands(result: ir.Value, inside: set[ir.Node]) -> set[ir.Value]:
    """The tensors that a block adds up to its output, also before normalizations."""

    def added_up(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        if node is None or node not in inside or node.op_type not in _PASSED or node.domain:
            return []
        inputs = node.inputs if node.op_type in ("Add", "Mul") else node.inputs[:1]
        return [arg for arg in inputs if arg is not None]

    return set(reached([result], added_up))


def _describe(
    edit: Edit, paths: Sequence[str], names: dict[str, str], had_nodes: Sequence[str]
) -> None:
    """Record the fates and signatures of the removed modules."""
    tagged = edit.tagged.refresh()
    fates: dict[str, Fate] = {}
    for path in had_nodes:
        if not tagged[path].nodes:
            fates[path] = Fate.DEAD
    fates |= dict.fromkeys(paths, Fate.IDENTITY)
    edit.set_fates(fates)

    def present(name: str) -> str | None:
        name = names.get(name, name)
        return name if name in tagged.values else None

    edit.rename(present)
    for path in list(edit.signatures):
        if fates.get(path) == Fate.DEAD:
            del edit.signatures[path]
    for path in paths:
        calls = edit.signatures.get(path)
        if calls is not None:
            edit.signatures[path] = [Signature(call.inputs, call.outputs[:1]) for call in calls]
