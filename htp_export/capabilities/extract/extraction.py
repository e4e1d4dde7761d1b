"""`extract`: one module of a file as a model of its own; `splice`: a model in place of a module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from htp_export.capabilities.extract.grafts import Graft, SplicedCalls, weight_key
from htp_export.editing.cut_models import cut_model
from htp_export.editing.edit import Edit
from htp_export.editing.flattening import read_flat
from htp_export.editing.submodels import remove_unused
from htp_export.errors import InputError
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import type_and_shape
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, for_change, load
from htp_export.model.tensor_names import Names


@dataclass(frozen=True)
class Extraction(HoldsModel):
    """The result of `extract`.

    Attributes:
        model: The extracted model; it shares the weights of the original model.
        path: The module.
        call: Number of the extracted call.
        inputs: Input → its type and shape, ``"FLOAT[1, 16, 768]"``.
        outputs: Output → its type and shape.
        nodes: Number of nodes.
        outside: Inputs that are not arguments of ``forward``: tensors computed outside the module.
        file: The file that was written; None if there is none.
    """

    model: ir.Model = field(repr=False)
    path: str
    call: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    nodes: int
    outside: tuple[str, ...]
    file: Path | None = None

    @property
    def summary(self) -> str:
        """The result in one line."""
        where = f" -> {self.file}" if self.file else ""
        return f"{self.path or '(root)'}: {self.nodes} nodes{where}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The inputs and outputs, one line each."""
        lines = [f"  in   {name}: {kind}" for name, kind in self.inputs.items()]
        lines += [f"  out  {name}: {kind}" for name, kind in self.outputs.items()]
        return tuple(lines)


@names_model_faults("model")
def extract(
    model: ModelSource, path: str, output: str | os.PathLike[str] | None = None, *, call: int = 0
) -> Extraction:
    """Extract one module as a valid model of its own.

    Its inputs are the arguments of the module's ``forward`` that are used, under their names; other
    tensors that are computed outside become inputs under their names in the file. Sizes are computed
    from its own inputs; dynamic dimensions stay dynamic. It has the initializers that it needs, and
    keeps opset, functions, tags, and its part of the module tree under the same paths. Inputs of
    the model with a default value, such as adapters of `lora.insert`, remain inputs with that value.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        path: The module.
        output: The file to write. External weights go into a file beside it, ``<name>.data``.
        call: Number of the call of a module that ran several times, from 0.

    Returns:
        The model, with the types and shapes of its inputs and outputs.

    Raises:
        UnknownModuleError: There is no such module; the message has the nearest names.
        InputError: There is no such call, or the module cannot be extracted; the message names a
            module that can.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> print(extract(program, "0"))
        0: 1 nodes
          in   input: FLOAT[2,4]
          out  linear: FLOAT[2,3]
    """
    check_target(output)
    tagged = read_flat(model, others=False)
    part = Cutter(tagged).cut(path, call)
    extracted = cut_model(tagged, part)
    inputs = {str(value.name): type_and_shape(value) for value in extracted.graph.inputs}
    outputs = {str(value.name): type_and_shape(value) for value in extracted.graph.outputs}
    signature = tagged.signature(part.path, call)
    arguments = signature.inputs if signature is not None else ()
    outside = tuple[str, ...]()
    if part.path:
        outside = tuple(name for name in part.inputs if name not in arguments)
    if output is not None:
        write_model(extracted, output, True if has_external_data(extracted) else None)
    return Extraction(
        model=extracted,
        path=part.path,
        call=call,
        inputs=inputs,
        outputs=outputs,
        nodes=sum(1 for _ in extracted.graph.all_nodes()),
        outside=outside,
        file=None if output is None else Path(output),
    )


@dataclass(frozen=True)
class Splice(HoldsModel):
    """The result of `splice`.

    Attributes:
        model: The model.
        path: The replaced module.
        calls: Numbers of the replaced calls.
        nodes_before: Number of nodes of the whole model before.
        nodes_after: Number of nodes of the whole model after.
        file: The file that was written; None if there is none.
    """

    model: ir.Model = field(repr=False)
    path: str
    calls: tuple[int, ...]
    nodes_before: int
    nodes_after: int
    file: Path | None = None

    @property
    def summary(self) -> str:
        """The result in one line."""
        where = f" -> {self.file}" if self.file else ""
        times = f" in {len(self.calls)} calls" if len(self.calls) > 1 else ""
        counts = f"{self.nodes_before} nodes before, {self.nodes_after} now"
        return f"{self.path or '(root)'}: replaced{times}; {counts}{where}"


@names_model_faults("model", "replacement")
def splice(
    model: ModelSource,
    path: str,
    replacement: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    call: int | None = None,
    share_weights: bool = False,
) -> Splice:
    """Replace a module with another model, such as a quantized or rewritten one.

    The replacement needs the inputs of the module under the names of ``extract``, or
    as many under other names in the same order; unused ones may be missing. It must return the
    module's outputs, in order. Inputs that the module returns unchanged, and constants, are not
    replaced. Types must be equal, and dimensions if both are known. Names in the replacement that
    are already used are changed. Inputs of the replacement with a default value are merged with
    inputs of the same name in the model, or become inputs of it.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        path: The module.
        replacement: The replacement, or its file.
        output: The file to write.
        call: Number of the call to replace, from 0; None for all calls.
        share_weights: As for `htp_export.tap`.

    Returns:
        The model with the replacement.

    Raises:
        UnknownModuleError: There is no such module.
        InputError: The module cannot be separated, its result is shared with another module, or the
            replacement has another signature; the message names the tensor.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> other = htp_export.export(torch.nn.Sigmoid().eval(), (torch.randn(2, 3),), verbose=False)
        >>> [node.op_type for node in htp_export.splice(program, "1", other).model.graph]
        ['Gemm', 'Sigmoid']
    """
    check_target(output)
    source = read_flat(model, others=False)
    copied = load(replacement)
    if copied.model is source.model:
        raise InputError("a model cannot replace a module of itself; extract the replacement first")
    changed = for_change(source, model)
    path = changed[path].path
    before = sum(1 for _ in changed.model.graph.all_nodes())
    calls = _outermost(changed, path) if call is None else (call,)
    cutter = Cutter(changed)
    parts = [cutter.cut(path, number) for number in calls]
    for part in parts:
        _refuse_shared_results(changed, part)
        _check_signature(part, copied.model)
    with Edit(changed) as edit:
        _replace(edit, copied, parts).describe()
    if output is not None:
        write_model(changed.model, output, share_weights=share_weights)
    after = sum(1 for _ in changed.model.graph.all_nodes())
    return Splice(
        changed.model, path, calls, before, after, None if output is None else Path(output)
    )


def _replace(edit: Edit, copied: TaggedModel, parts: Sequence[Cut]) -> Graft:
    """Replace the parts of the model with copies of the replacement; return the last copy."""
    changed, path = edit.tagged, parts[0].path
    calls = SplicedCalls(changed, copied, path, [part.call for part in parts])
    has_callers = tags.CALLERS in changed.model.metadata_props
    edit.set_modules(calls.hierarchy, calls.tree if has_callers else None)
    optional = [value for value in parts[0].initializers if value.is_graph_input()]
    # Original result → its placeholder, and then its replacement.
    current = _remove_parts(changed, parts)
    for node in changed.nodes:
        owners = changed.owners_of(node)
        if node.graph is not None and owners:
            edit.set_calls(node, calls.encode_calls(node, owners))
    weights = {weight_key(value): value for value in changed.model.graph.initializers.values()}
    for part in parts:
        graft = Graft(edit, copied, path, part.call, calls, weights)
        inputs = [current.get(old, old) for old in part.inputs.values()]
        results = graft.insert(
            _matched(list(part.inputs), inputs, graft.inputs),
            [current.get(old) for old in part.outputs.values()],
        )
        for old, new in zip(part.outputs.values(), results, strict=True):
            if old in current:
                current[old] = new
    _remove_unused_inputs(changed.model.graph, optional)
    changed.model.graph.sort()
    return graft


def _remove_parts(changed: TaggedModel, parts: Sequence[Cut]) -> dict[ir.Value, ir.Value]:
    """Remove the nodes of parts; return result → placeholder, which its consumers use now."""
    placeholders: dict[ir.Value, ir.Value] = {}
    for part in parts:
        for old in part.outputs.values():
            if _is_own(changed, part, old):
                placeholders[old] = _detach(changed.model.graph, old, part)
    removable: dict[ir.Node, None] = {}
    results: list[ir.Value] = []
    for part in parts:
        removable.update(dict.fromkeys((*part.nodes, *part.size_nodes)))
    for node in removable:
        results.extend(node.outputs)
    remove_unused(results, removable)
    names = Names(changed.model)
    for old in placeholders:
        producer = old.producer()
        # The producer is still there if other modules share its work; the new result has its name.
        if producer is not None and producer.graph is not None:
            old.name = names.tensors.unused(f"{old.name}.shared")
    return placeholders


def _remove_unused_inputs(graph: ir.Graph, optional: Iterable[ir.Value]) -> None:
    """Remove inputs with a default value, such as factors of adapters, that nothing uses now."""
    for value in optional:
        if not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)
            graph.initializers.pop(str(value.name), None)


def _outermost(tagged: TaggedModel, path: str) -> tuple[int, ...]:
    """The calls of a module that did not run inside another call of it."""
    outermost = []
    for number in range(max(tagged[path].calls, 1)):
        callers = tagged.calls.chain(Instance(path, number))[1:]
        if all(caller.path != path for caller in callers):
            outermost.append(number)
    return tuple(outermost)


def _is_own(tagged: TaggedModel, part: Cut, result: ir.Value) -> bool:
    """Whether the module computes a result: it is no unchanged input, and no constant."""
    if result in part.inputs.values() or result.is_initializer():
        return False
    return result not in tagged.index.constant


def _detach(graph: ir.Graph, old: ir.Value, part: Cut) -> ir.Value:
    """Replace a result of the part with a placeholder in all consumers outside of the part."""
    placeholder = ir.Value(name=old.name, type=old.type, shape=old.shape)
    for use in old.uses():
        if use.node not in part.nodes:
            use.node.replace_input_with(use.idx, placeholder)
    for index, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[index] = placeholder
    return placeholder


def _refuse_shared_results(tagged: TaggedModel, part: Cut) -> None:
    """Raise an `InputError` if other modules also own the node of a result: it cannot be replaced for one."""
    for value in part.outputs.values():
        producer = value.producer() if _is_own(tagged, part, value) else None
        if producer is None:
            continue
        for work in tagged.work_of(producer).parts:
            owner = work.call.path
            if part.path not in work.modules and not tags.is_under(part.path, owner):
                both = tags.common_ancestor((owner, part.path))
                raise InputError(
                    f"module {part.path!r} shares its result {value.name!r} with module {owner!r}; "
                    f"replace {both or '(root)'!r}, which holds both"
                )


def _check_signature(part: Cut, replacement: ir.Model) -> None:
    """Raise an `InputError` if inputs or outputs of the replacement do not match the module's."""
    inputs = [value for value in replacement.graph.inputs if not value.is_initializer()]
    outputs = replacement.graph.outputs
    pairs = _matched(list(part.inputs), list(part.inputs.values()), inputs)
    if not pairs and inputs:
        raise InputError(
            f"module {part.path!r} has the inputs {_listed(part.inputs)}, and the replacement {_listed(inputs)}"
        )
    if len(outputs) != len(part.outputs):
        raise InputError(
            f"module {part.path!r} returns {len(part.outputs)} tensors ({_listed(part.outputs)}), "
            f"and the replacement {len(outputs)} ({_listed(outputs)})"
        )
    sides = [("input", new, old) for new, old in pairs.items()]
    for new, old in zip(outputs, part.outputs.values(), strict=True):
        sides.append(("output", new, old))
    for side, new, old in sides:
        problem = _difference(new, old)
        if problem:
            raise InputError(
                f"module {part.path!r}: {side} {new.name!r} of the replacement has {problem}"
            )


def _matched(
    names: Sequence[str], values: Sequence[ir.Value], inputs: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """The replacement's input → its argument, by name or else in order; empty if neither fits."""
    by_name = dict(zip(names, values, strict=True))
    if all(value.name in by_name for value in inputs):
        return {value: by_name[str(value.name)] for value in inputs}
    if len(inputs) != len(values):
        return {}
    return dict(zip(inputs, values, strict=True))


def _listed(names: Iterable[ir.Value | str]) -> str:
    return ", ".join(str(getattr(name, "name", name)) for name in names) or "nothing"


def _difference(new: ir.Value, old: ir.Value) -> str:
    """The difference of the types or known dimensions of two values; empty if there is none."""
    if new.dtype is not None and old.dtype is not None and new.dtype != old.dtype:
        return f"type {new.dtype.name}, and the module {old.dtype.name}"
    if new.shape is None or old.shape is None:
        return ""
    different = f"shape {new.shape}, and the module {old.shape}"
    if len(new.shape) != len(old.shape):
        return different
    for size, old_size in zip(new.shape, old.shape, strict=True):
        if size != old_size and isinstance(size, int) and isinstance(old_size, int):
            return different
    return ""
