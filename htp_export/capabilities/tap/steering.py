"""`steer`: optional vectors that are added to inputs and outputs of modules."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.tap.tapping import (
    Places,
    Tapped,
    TappedTensor,
    named_places,
    written,
)
from htp_export.editing.edit import Edit
from htp_export.editing.flattening import read_for_change
from htp_export.editing.hooks import Hooks
from htp_export.editing.outputs import add_zeros_input
from htp_export.errors import InputError
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import type_and_shape
from htp_export.model.module_tensors import ModuleTensor
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
    wanted, missing = named_places(tagged, places, ".steer")
    with Edit(tagged) as edit:
        steering = _Steering(edit)
        added = [steering.add(name, tensors) for name, tensors in wanted.items()]
    count = many(len(added), "optional input")
    summary = f"{count} added; without them, the model computes what it did before{missing}"
    return written(tagged, added, summary, output, had_map=had_map, share_weights=share_weights)


class _Steering:
    """Adds vectors to tensors of a model, in place."""

    def __init__(self, edit: Edit) -> None:
        self._edit, self._hooks = edit, Hooks(edit, "steered")
        self._tagged = edit.tagged

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
            # The default binds the name now: the loop changes it.
            def add(value: ir.Value, call: Instance, name: str = tensor.place) -> list[ir.Node]:
                return [self._edit.node("Add", [value, vector], call, f"{name}.steer")]

            self._hooks.insert(tensor, add)
        return TappedTensor.of(vector, tensors)
