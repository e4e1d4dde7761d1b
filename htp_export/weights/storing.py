"""Stored tensors in both forms of a file: an initializer, or the output of a ``Constant`` node."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.model.module_facts import stored_tensor

_FORMS = ("value", "sparse_value")  # prefixes of the names of a Constant's attributes


def numbers_of(value: ir.Value) -> ir.TensorProtocol:
    """The tensor of a stored value."""
    tensor = stored_tensor(value)
    assert tensor is not None, f"{value.name!r} is not stored"
    return tensor


def store(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace a stored tensor.

    Examples:
        >>> constant = ir.node("Constant", [], {"value_floats": [1.0, 2.0]})
        >>> store(constant.outputs[0], ir.tensor([3.0, 4.0]))
        >>> numbers_of(constant.outputs[0]).numpy().tolist(), list(constant.attributes)
        ([3.0, 4.0], ['value'])
    """
    node = value.producer()
    if node is None:
        value.const_value = tensor
        return
    for name in [name for name in node.attributes if name.startswith(_FORMS)]:
        del node.attributes[name]
    # The attribute holds the numbers: it cannot refer to a data file that is written later.
    node.attributes.add(ir.AttrTensor("value", ir.Tensor(tensor.numpy(), dtype=tensor.dtype)))


def is_in_model(value: ir.Value) -> bool:
    """Whether a stored tensor is in its model, after nodes and initializers were removed."""
    node = value.producer()
    return value.is_initializer() if node is None else node.graph is not None
