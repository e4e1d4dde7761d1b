"""`steer`: optional vectors that are added to inputs and outputs of modules."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.tap.tapping import Places, Tapped, TappedTensor, named_places, written
from htp_export.editing.edit import ROOT, Edit
from htp_export.editing.editing import insert_behind
from htp_export.editing.flattening import read_for_change
from htp_export.editing.outputs import add_zeros_input
from htp_export.errors import InputError
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import type_and_shape
from htp_export.model.module_tensors import IN, OUT, ModuleTensor
from htp_export.model.tagged import ModelSource
from htp_export.reporting.columns import many
from htp_export.runtime.declared_inputs import check_elements


@names_model_faults("model")
def steer(
    model: ModelSource,
    places: Places,
    output: str | os.PathLike[str] | None = None,
    *,
    share_weights: bool = False,
) -> Tapped:
    """Add a vector, an optional input of the file, to inputs and outputs of modules, like a hook.

    The vector has the size of the tensor's last axis, and is added to all its rows. Its default is
    zero. A vector at ``PATH:out`` acts like a forward hook of the module: all consumers of its
    result use the sum. One at ``PATH:in`` acts like a forward pre-hook: the module and its
    descendants use the sum, other consumers do not. The addition belongs to the module. See
    ``docs/taps.md``.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model, as for `tap`.
        places: Places as for `tap`, for inputs that are called ``<place>.steer``; or name of an
            input → one place or several.
        output: The file to write.
        share_weights: As for `tap`.

    Returns:
        The model, and its new inputs.

    Raises:
        SelectorError: A place is invalid, or matches no module, call or tensor.
        InputError: The file has no such tensor; it is not of floating point; its last size is open;
            or it is the same as another tensor, which the message names.
        UntaggedModelError: The model has no tags of htp_export.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> [(each.name, each.kind) for each in htp_export.steer(program, "0:out").tensors]
        [('0:out.steer', 'FLOAT[3]')]
    """
    check_target(output)
    tagged = read_for_change(model)
    had_map = tags.MAP in tagged.model.metadata_props
    wanted = named_places(tagged, places, ".steer")
    with Edit(tagged) as edit:
        steering = _Steering(edit)
        added = [steering.add(name, tensors) for name, tensors in wanted.items()]
    summary = f"{many(len(added), 'optional input')} added; without them, the model computes what it did before"
    return written(tagged, added, summary, output, had_map=had_map, share_weights=share_weights)


class _Steering:
    """Adds vectors to tensors of a model, in place."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._tagged = edit.tagged
        self._values = dict(edit.tagged.values)

    def add(self, name: str, tensors: Sequence[ModuleTensor]) -> TappedTensor:
        """Add an input and its additions to the tensors."""
        described = []
        for tensor in tensors:
            described += [self._tagged.inferred.described(value) for value in tensor.values]
        kinds = {(value.dtype, value.shape[-1] if value.shape else None) for value in described}
        [(dtype, size)] = kinds if len(kinds) == 1 else [(None, None)]
        if not isinstance(size, int) or dtype is None or not dtype.is_floating_point():
            listed = ", ".join(f"{value.name!r} is {type_and_shape(value)}" for value in described)
            raise InputError(
                f"{name!r}: a vector needs floating-point tensors of one type and last size; {listed}"
            )
        check_elements(name, [size])
        unused = self._edit.names.tensors.unused(name)
        vector = add_zeros_input(self._edit.graph, unused, dtype, [size])
        for tensor in tensors:
            self._add_at(tensor, Instance(tensor.path, tensor.call or 0), vector)
        return TappedTensor.of(vector, tensors)

    def _add_at(self, tensor: ModuleTensor, call: Instance, vector: ir.Value) -> None:
        """Add a vector to one tensor, for the consumers that its place determines."""
        value = self._value(tensor, call)
        enters = tensor.side == IN
        inside = {use: self._is_inside(use.node, call, tensor) for use in value.uses()}
        consumers = [
            (use.node, use.idx) for use, is_inside in inside.items() if is_inside == enters
        ]
        owner = self._tagged.calls.caller(call) if enters else call
        node = self._edit.node("Add", [value, vector], owner or ROOT, f"{tensor.place}.steer")
        insert_behind(self._edit.graph, value, node)
        result = node.outputs[0]
        old = str(value.name)
        if enters:
            for consumer, index in consumers:
                consumer.replace_input_with(index, result)
            result.name = new = self._edit.names.tensors.unused(f"{old}.steered")
            result.type = value.type
            result.shape = value.shape
        else:
            self._edit.replace_uses(value, result, consumers, rest=f"{old}.base")
            new = str(value.name)
        self._rename(call, old, new, itself=enters and bool(call.path))
        for changed in (value, result):
            self._values[str(changed.name)] = changed

    def _value(self, tensor: ModuleTensor, call: Instance) -> ir.Value:
        """The current tensor of a place.

        Raises:
            InputError: The file has the same tensor for another place, too, or no signature of the
                call.
        """
        if call.call >= len(self._edit.signatures.get(call.path, ())):
            problem = (
                "the file has no signature of this call: it runs in a branch or a loop body, "
                "or a library exported it"
            )
            raise InputError(f"{tensor.place}: a vector cannot be added: {problem}")
        signature = self._edit.signatures[call.path][call.call]
        if tensor.side == IN:
            name = signature.inputs[tensor.name]
        else:
            name = signature.outputs[int(tensor.name)]
        places = [(IN, key) for key, other in signature.inputs.items() if other == name]
        places += [
            (OUT, str(index)) for index, other in enumerate(signature.outputs) if other == name
        ]
        own = (tensor.side, tensor.name)
        same = [f":{side}[{key}]" for side, key in places if (side, key) != own]
        if tensor.side == OUT:
            same += [f"{path}:out" for path in self._merged_with(call, str(name))]
        is_model_input = tensor.side == IN and not call.path
        if same and not is_model_input:
            raise InputError(
                f"{tensor.place}: the file has the same tensor for {', '.join(same)}, and cannot add to only one; "
                "choose a place with a tensor of its own"
            )
        return self._values[str(name)]

    def _merged_with(self, call: Instance, name: str) -> list[str]:
        """The modules, outside the call and its callers, with an equal result that was merged."""
        around = self._tagged.calls.chain(call)
        merged = []
        for path, signatures in self._edit.signatures.items():
            for number, signature in enumerate(signatures):
                other = Instance(path, number)
                related = other in around or call in self._tagged.calls.chain(other)
                if name in signature.given and name not in signature.taken and not related:
                    merged.append(path)
        return merged

    def _is_inside(self, node: ir.Node, call: Instance, tensor: ModuleTensor) -> bool:
        """Whether a consumer runs inside a call; an `InputError` if only a part of it does."""
        parts = [call in part.running for part in self._tagged.work_of(node).parts]
        if any(parts) and not all(parts):
            owners = ", ".join(repr(owner) for owner in self._tagged.owners_of(node))
            raise InputError(
                f"{tensor.place}: one {node.op_type} uses it for {owners} together; "
                "steer the file before it is optimised"
            )
        return bool(parts) and all(parts)

    def _rename(self, call: Instance, old: str, new: str, *, itself: bool) -> None:
        """Rename a tensor in signatures of calls inside a call, and with ``itself`` in its own."""
        for path, signatures in self._edit.signatures.items():
            for number, signature in enumerate(signatures):
                other = Instance(path, number)
                if (other != call or itself) and call in self._tagged.calls.chain(other):
                    signatures[number] = signature.renamed(
                        lambda name: new if name == old else name
                    )
