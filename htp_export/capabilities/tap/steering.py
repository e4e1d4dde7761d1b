"""`steer`: vectors that a run may add to inputs and outputs of modules."""

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
    """Add a vector, an optional input of the file, to inputs and outputs of modules, as a hook in PyTorch would.

    The vector has the size of the tensor's last axis, and is added to all its rows. A run that does
    not give it adds zero. A vector at ``PATH:out`` is what a forward hook of the module adds: what
    reads its result reads the sum. One at ``PATH:in`` is what a forward pre-hook adds: the module
    and what is inside of it read the sum, others do not. The sum is computed by the module. See
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
        SelectorError: A place cannot be read, or matches no module, call or tensor.
        InputError: The file has no such tensor; it is not of floating point; its last size is open;
            or it cannot be told apart from another one, and the message says which.
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
    wanted = named_places(tagged, places, ".steer")
    with Edit(tagged) as edit:
        steering = _Steering(edit)
        added = [steering.add(name, tensors) for name, tensors in wanted.items()]
    said = f"{many(len(added), 'optional input')} added; without them, the model computes what it did before"
    return written(tagged, added, said, output, share_weights=share_weights)


class _Steering:
    """Adds vectors to tensors of a model, in place."""

    def __init__(self, edit: Edit) -> None:
        self._edit, self._tagged = edit, edit.tagged
        self._values = dict(edit.tagged.values)

    def add(self, name: str, tensors: Sequence[ModuleTensor]) -> TappedTensor:
        known = [
            self._tagged.inferred.described(value) for tensor in tensors for value in tensor.values
        ]
        kinds = {(value.dtype, value.shape[-1] if value.shape else None) for value in known}
        [(dtype, size)] = kinds if len(kinds) == 1 else [(None, None)]
        if not isinstance(size, int) or dtype is None or not dtype.is_floating_point():
            listed = ", ".join(f"{value.name!r} is {type_and_shape(value)}" for value in known)
            raise InputError(
                f"{name!r}: a vector needs floating-point tensors of one type and last size; {listed}"
            )
        check_elements(name, [size])
        vector = add_zeros_input(
            self._edit.graph, self._edit.names.tensors.unused(name), dtype, [size]
        )
        for tensor in tensors:
            self._add_at(tensor, Instance(tensor.path, tensor.call or 0), vector)
        return TappedTensor.of(vector, tensors)

    def _add_at(self, tensor: ModuleTensor, call: Instance, vector: ir.Value) -> None:
        value = self._value(tensor, call)
        enters = tensor.side == IN
        inside = {use: self._is_inside(use.node, call, tensor) for use in value.uses()}
        readers = [(use.node, use.idx) for use, is_inside in inside.items() if is_inside == enters]
        made_by = self._tagged.calls.caller(call) if enters else call
        node = self._edit.node("Add", [value, vector], made_by or ROOT, f"{tensor.place}.steer")
        insert_behind(self._edit.graph, value, node)
        result, old = node.outputs[0], str(value.name)
        if enters:
            for reader, at in readers:
                reader.replace_input_with(at, result)
            result.name = new = self._edit.names.tensors.unused(f"{old}.steered")
            result.type, result.shape = value.type, value.shape
        else:
            self._edit.replace_uses(value, result, readers, rest=f"{old}.base")
            new = str(value.name)
        self._rename(call, old, new, itself=enters and bool(call.path))
        self._values.update({str(each.name): each for each in (value, result)})

    def _value(self, tensor: ModuleTensor, call: Instance) -> ir.Value:
        """The tensor as it is now, which is certain to be that of this place alone."""
        if call.call >= len(self._edit.signatures.get(call.path, ())):
            why = "the file has no signature of this call: it runs in a branch or a loop body, or a library exported it"
            raise InputError(f"{tensor.place}: a vector cannot be added: {why}")
        signature = self._edit.signatures[call.path][call.call]
        name = (
            signature.inputs[tensor.name]
            if tensor.side == IN
            else signature.outputs[int(tensor.name)]
        )
        sides = ((IN, signature.inputs.items()), (OUT, enumerate(signature.outputs)))
        places = [
            (side, str(key)) for side, listed in sides for key, each in listed if each == name
        ]
        same = [
            f":{side}[{key}]" for side, key in places if (side, key) != (tensor.side, tensor.name)
        ]
        if tensor.side == OUT:
            same += [f"{path}:out" for path in self._merged_with(call, str(name))]
        if same and not (tensor.side == IN and not call.path):
            raise InputError(
                f"{tensor.place}: the file has the same tensor for {', '.join(same)}, and cannot add to one alone; "
                "choose a place where it is another"
            )
        return self._values[str(name)]

    def _merged_with(self, call: Instance, name: str) -> list[str]:
        """The modules outside of a call, and not around it, that made the same tensor: equal work, merged into one."""
        around, found = self._tagged.calls.chain(call), []
        for path, signatures in self._edit.signatures.items():
            for number, signature in enumerate(signatures):
                other = Instance(path, number)
                related = other in around or call in self._tagged.calls.chain(other)
                if name in signature.given and name not in signature.taken and not related:
                    found.append(path)
        return found

    def _is_inside(self, node: ir.Node, call: Instance, tensor: ModuleTensor) -> bool:
        parts = [call in part.running for part in self._tagged.work_of(node).parts]
        if any(parts) and not all(parts):
            owners = ", ".join(repr(owner) for owner in self._tagged.owners_of(node))
            raise InputError(
                f"{tensor.place}: one {node.op_type} reads it for {owners} together; "
                "steer the file before it is optimised"
            )
        return bool(parts) and all(parts)

    def _rename(self, call: Instance, old: str, new: str, *, itself: bool) -> None:
        """Write that what ran inside a call took and gave a tensor of another name; the call itself took it, too."""
        for path, signatures in self._edit.signatures.items():
            for number, signature in enumerate(signatures):
                other = Instance(path, number)
                if (other != call or itself) and call in self._tagged.calls.chain(other):
                    signatures[number] = signature.renamed(
                        lambda name: new if name == old else name
                    )
