"""Whether an ONNX file computes what the PyTorch model does, and its parameters are read where PyTorch reads them."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export import tags
from htp_export.errors import InputError
from htp_export.run.readers import named_tensors, parameter_readers
from htp_export.tagged import TaggedModel, load

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["TOLERANCES", "Parity", "check_parity"]

_log = logging.getLogger(__name__)

TOLERANCES: Mapping[str, tuple[float, float]] = {
    "float64": (1e-6, 1e-5),
    "float32": (1e-4, 1e-3),
    "float16": (1e-2, 1e-2),
    "bfloat16": (5e-2, 5e-2),
}
"""Dtype → absolute and relative tolerance, ``a`` and ``r``.

Elements agree if they differ by no more than ``a * max(1, rms) + r * |expected|``, ``rms`` the root mean square of the
output: kernels sum in other orders, and where large terms cancel, the error is that of the terms and not of the sum. In
float32, a deep model amplifies it to some 1e-5; the half formats keep 3 and 2 digits. Other dtypes have to be equal.
"""


@dataclass(frozen=True)
class Parity:
    """What the check found.

    Attributes:
        max_abs: The largest difference between elements of the outputs; NaN where one is NaN and the other is not.
        outputs: How many outputs agree or do not: all of them.
        wrong_outputs: What is wrong with each output that does not agree.
        parameters: How many initializers are known to be a parameter or buffer, by name or, for weights, by value.
        misplaced: Each of those that a node reads whose owners do not: ``"fc.weight is read by 'node' of other"``.
    """

    max_abs: float
    outputs: int
    wrong_outputs: tuple[str, ...]
    parameters: int
    misplaced: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the outputs agree and the owners are right."""
        return not self.wrong_outputs and not self.misplaced

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON.

        Example:
            >>> Parity(1e-6, 1, (), 2, ()).to_dict()["ok"]
            True
        """
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        """One sentence where all is well, else a line for each thing that is not.

        Example:
            >>> print(Parity(1e-6, 1, (), 2, ()))
            every module agrees with PyTorch: outputs within 1.0e-06, owners of 2 parameters right
        """
        if self.ok:
            return (
                f"every module agrees with PyTorch: outputs within {self.max_abs:.1e}, "
                f"owners of {self.parameters} parameters right"
            )
        outputs = (
            f"outputs differ from PyTorch: {'; '.join(self.wrong_outputs)}"
            if self.wrong_outputs
            else f"outputs agree with PyTorch: max difference {self.max_abs:.1e} over {self.outputs} outputs"
        )
        owners = f"owners of {len(self.misplaced)} of {self.parameters} parameters are wrong:" if self.misplaced else ""
        return "\n".join((outputs, *filter(None, [owners]), *(f"  {line}" for line in self.misplaced)))


def check_parity(
    model: nn.Module,
    onnx_path: str | PathLike[str],
    kwargs: Mapping[str, Any],
    args: Sequence[Any] = (),
) -> Parity:
    """Run the model and its ONNX file on the same inputs, and compare outputs and the owners of parameters.

    The model runs once, in eval mode. Outputs are compared in the order in which PyTorch returns them, by the
    tolerances in ``TOLERANCES``; NaN agrees with NaN only, and shapes and dtypes have to be equal. An initializer that
    is a parameter is right if every node that reads it has an owner at or below a module that holds this tensor, or one
    that read it when PyTorch ran; tied parameters are one tensor.

    Args:
        model: The PyTorch model.
        onnx_path: What it was exported to.
        kwargs: Its keyword arguments.
        args: Its positional arguments.

    Raises:
        InputError: If ONNX Runtime cannot run the file, or its inputs are not those of the call.
        FileError: If the file cannot be read.
    """
    tagged = load(onnx_path)
    with _evaluating(model), parameter_readers(model) as readers:
        expected = [_to_numpy(tensor) for tensor in _tensors(model(*args, **kwargs))]
    found = _run_onnx(onnx_path, [*_tensors(args), *_tensors(dict(kwargs))], kwargs)
    max_abs, wrong = _compare_outputs(expected, found)
    parameters = _parameters(tagged, model)
    misplaced = [line for value, name in parameters.items() for line in _misplaced(tagged, value, name, readers, model)]
    return Parity(max_abs, len(expected), tuple(wrong), len(parameters), tuple(misplaced))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's own mode comes back."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    import ml_dtypes
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has none of its own
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _run_onnx(
    path: str | PathLike[str], tensors: list[torch.Tensor], kwargs: Mapping[str, Any]
) -> list[npt.NDArray[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(fspath(path), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        if all(name in kwargs for name in names):
            tensors = [kwargs[name] for name in names]
        if len(names) != len(tensors):
            raise InputError(f"{fspath(path)}: takes {len(names)} inputs, and the call has {len(tensors)} tensors")
        kinds = [value.type for value in session.get_inputs()]
        values = zip(names, map(_to_numpy, tensors), kinds, strict=True)
        outputs = session.run_with_ort_values(
            [value.name for value in session.get_outputs()],
            {name: _ort_value(array, kind) for name, array, kind in values},
        )
    except InputError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no base but this
        raise InputError(f"{fspath(path)}: ONNX Runtime cannot run it: {str(error).strip()}") from error
    return [_from_ort(value) for value in outputs]


def _ort_value(array: npt.NDArray[Any], kind: str) -> Any:
    import onnxruntime

    if kind == "tensor(bfloat16)":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(ir.DataType.BFLOAT16))
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _from_ort(value: Any) -> npt.NDArray[Any]:
    import ml_dtypes

    array = np.asarray(value.numpy())
    return array.view(ml_dtypes.bfloat16) if value.data_type() == "tensor(bfloat16)" else array


def _compare_outputs(
    expected: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]
) -> tuple[float, list[str]]:
    """The largest difference, and what is wrong."""
    if len(expected) != len(found):
        return float("nan"), [f"PyTorch returns {len(expected)} tensors, and the file {len(found)}"]
    largest, wrong = 0.0, []
    for position, (one, other) in enumerate(zip(expected, found, strict=True)):
        difference, problem = _compare(one, other)
        largest = max(largest, difference) if largest == largest else largest  # NaN stays NaN
        if difference != difference:
            largest = difference
        if problem:
            wrong.append(f"output {position}: {problem}")
    return largest, wrong


def _compare(expected: npt.NDArray[Any], found: npt.NDArray[Any]) -> tuple[float, str]:
    """The largest difference of two arrays, and what is wrong, or ``""``.

    Example:
        >>> _compare(np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf]))
        (0.0, '')
        >>> _compare(np.float32([1, np.nan]), np.float32([1, 2]))
        (nan, 'NaN at 1 elements of one and not of the other')
        >>> _compare(np.ones((1, 3)), np.ones(3))[1]
        'shape (3,), not (1, 3)'
    """
    if expected.shape != found.shape:
        return float("nan"), f"shape {found.shape}, not {expected.shape}"
    if expected.dtype != found.dtype:
        return float("nan"), f"dtype {found.dtype}, not {expected.dtype}"
    absolute, relative = TOLERANCES.get(str(expected.dtype), (0.0, 0.0))
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    one, other = expected.astype(wide), found.astype(wide)
    strays = int(np.count_nonzero(np.isnan(one) != np.isnan(other)))
    if strays:
        return float("nan"), f"NaN at {strays} elements of one and not of the other"
    unequal = (expected != found) & ~np.isnan(one)  # equal infinities have no difference to take
    difference = np.abs(one[unequal] - other[unequal])
    finite = one[np.isfinite(one)]
    absolute *= max(1.0, float(np.sqrt(np.mean(np.abs(finite) ** 2)))) if finite.size else 1.0
    largest = float(difference.max(initial=0.0))
    outside = int(np.count_nonzero(~(difference <= absolute + relative * np.abs(one[unequal]))))
    return largest, f"{outside} of {expected.size} elements differ, by up to {largest:.1e}" if outside else ""


def _parameters(tagged: TaggedModel, model: nn.Module) -> dict[ir.Value, str]:
    """Initializer → the parameter or buffer that it is: by name, and weights also by value.

    Exporters fold the transposition of a Linear's weight into the weight, which loses its name.
    """
    initializers = [value for graph in tagged.model.graphs() for value in graph.initializers.values()]
    tensors = dict(named_tensors(model))
    found = {value: value.name for value in initializers if value.name in tensors}
    weights: defaultdict[frozenset[int], list[tuple[str, npt.NDArray[Any]]]] = defaultdict(list)
    for name in tensors.keys() - found.values():
        if tensors[name].dim() == 2:
            weights[frozenset(tensors[name].shape)].append((name, _to_numpy(tensors[name])))
    for value in initializers:
        shape = frozenset(value.const_value.shape.numpy()) if value.const_value is not None else frozenset()
        if value in found or value.const_value is None or len(value.const_value.shape) != 2 or shape not in weights:
            continue
        array = value.const_value.numpy()
        same = (name for name, weight in weights[shape] if _equal(array, weight) or _equal(array, weight.T))
        matched = next(same, None)
        if matched is not None:
            found[value] = matched
    return {value: name for value, name in found.items() if name is not None}


def _equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two matrices are equal; the first row tells most of those apart that are not."""
    alike = one.shape == other.shape and one.dtype == other.dtype and np.array_equal(one[:1], other[:1])
    return alike and np.array_equal(one, other)


def _misplaced(
    tagged: TaggedModel, initializer: ir.Value, name: str, readers: Mapping[str, frozenset[str]], model: nn.Module
) -> Iterator[str]:
    """The nodes that read the initializer of a parameter and belong to no module that does."""
    right = readers[name]
    strays = [use.node for use in initializer.uses() if not _reads(tagged, use.node, right)]
    if strays:  # exporters merge equal tensors under one name: then it may be read wherever any of them is
        right = right.union(*(readers[other] for other in _equal_tensors(model, name)))
    for node in strays:
        if not _reads(tagged, node, right):
            owners = ", ".join(repr(owner) for owner in tagged.owners_of(node)) or "no module"
            yield f"{name} is read by {node.op_type} {node.name!r} of {owners}"


def _reads(tagged: TaggedModel, node: ir.Node, modules: frozenset[str]) -> bool:
    return any(tags.is_under(owner, path) for owner in tagged.owners_of(node) for path in modules)


def _equal_tensors(model: nn.Module, name: str) -> list[str]:
    import torch

    every = dict(named_tensors(model))
    this = every[name]
    alike = (other for other, tensor in every.items() if tensor.shape == this.shape and tensor.dtype == this.dtype)
    return [other for other in alike if torch.equal(every[other], this)]
