"""Computations at inputs and outputs of module calls, which act as hooks in PyTorch do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from htp_export.editing.edit import ROOT, Edit
from htp_export.editing.editing import insert_behind
from htp_export.errors import InputError
from htp_export.format.call_tree import Instance
from htp_export.model.module_tensors import IN, OUT, ModuleTensor

Create: TypeAlias = Callable[[ir.Value, Instance], Sequence[ir.Node]]
"""Accepts a tensor and a module call, and returns new nodes of this call; the last one has the result."""


class Hooks:
    """Inserts computations at tensors of modules, in place.

    One at an output acts like a forward hook: all consumers outside the module's call use the
    result. One at an input acts like a forward pre-hook: the call and its descendants use the
    result, other consumers do not.

    Args:
        edit: The edit that the computations belong to.
        word: The last part of names of tensors that change, such as ``steered``.
    """

    def __init__(self, edit: Edit, word: str) -> None:
        self._edit, self._word = edit, word
        self._tagged = edit.tagged
        self._values = dict(edit.tagged.values)

    def insert(self, tensor: ModuleTensor, create: Create) -> None:
        """Insert a computation at one tensor.

        Raises:
            InputError: The file has the same tensor for another place, too, no signature of the
                call, or one consumer for several calls.
        """
        call = Instance(tensor.path, tensor.call or 0)
        enters = tensor.side == IN
        value, consumers = self.place(tensor)
        owner = self._tagged.calls.caller(call) if enters else call
        before = value
        for node in create(value, owner or ROOT):
            insert_behind(self._edit.graph, before, node)
            before = node.outputs[0]
        result = before
        old = str(value.name)
        if enters:
            for consumer, index in consumers:
                consumer.replace_input_with(index, result)
            result.name = new = self._edit.names.tensors.unused(f"{old}.{self._word}")
            result.type = value.type
            result.shape = value.shape
        else:
            self._edit.replace_uses(value, result, consumers, rest=f"{old}.base")
            new = str(value.name)
        self._rename(call, old, new, itself=enters and bool(call.path))
        for changed in (value, result):
            self._values[str(changed.name)] = changed

    def place(self, tensor: ModuleTensor) -> tuple[ir.Value, list[tuple[ir.Node, int]]]:
        """The current tensor of a place, and the consumers of a result there; nothing is changed.

        Raises:
            InputError: As for `insert`.
        """
        call = Instance(tensor.path, tensor.call or 0)
        value = self._value(tensor)
        inside = {use: self._is_inside(use.node, call, tensor) for use in value.uses()}
        enters = tensor.side == IN
        consumers = [
            (use.node, use.idx) for use, is_inside in inside.items() if is_inside == enters
        ]
        return value, consumers

    def _value(self, tensor: ModuleTensor) -> ir.Value:
        """The current tensor of a place; an `InputError` if it belongs to another place, too."""
        call = Instance(tensor.path, tensor.call or 0)
        if call.call >= len(self._edit.signatures.get(call.path, ())):
            raise InputError(
                f"{tensor.place}: it cannot be changed: the file has no signature of this call: "
                "it runs in a branch or a loop body, or a library exported it"
            )
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
                f"{tensor.place}: the file has the same tensor for {', '.join(same)}, and cannot change only one; "
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
                "change the file before it is optimised"
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
