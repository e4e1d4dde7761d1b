"""`lora.insert`: model inputs for low-rank adapters of linear layers."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.lora.linears import (
    Linear,
    NotLinearError,
    linear_paths,
    linears_of,
    lora_layers,
    unquantized,
)
from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_initializer, replace_uses, replace_with
from htp_export.editing.flattening import read_for_change
from htp_export.editing.outputs import add_zeros_input
from htp_export.editing.submodels import remove_unused
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format.call_tree import Instance
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.model_metadata import FACTORS, factor_module, factor_name, write_lora
from htp_export.format.recipes import CONSTANT
from htp_export.format.signatures import Signature
from htp_export.model.boundaries import dependence, reads_and_results
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, TaggedResult
from htp_export.plans.rules import modules_within
from htp_export.process.progress import counted
from htp_export.reporting.columns import Column, many
from htp_export.reporting.tables import ModuleTable
from htp_export.shapes.operator_kinds import dequantizes, quantizes

_CLASS = "torch.nn.modules.linear.Linear"


@dataclass(frozen=True)
class LoraLayer:
    """A linear layer that accepts adapters.

    Attributes:
        path: The module.
        inputs: Number of input features.
        outputs: Number of output features.
        calls: How often it runs.
        names: The names of the two inputs of the model.
    """

    path: str
    inputs: int
    outputs: int
    calls: int
    names: tuple[str, ...]


LORA_COLUMNS: tuple[Column[LoraLayer], ...] = (
    Column("inputs", "inputs"),
    Column("outputs", "outputs"),
    Column("calls", "calls"),
    Column("names", "model inputs", text=", ".join, right=False),
)


@dataclass(frozen=True)
class InsertedLora(TaggedResult, ModuleTable):
    """The result of `htp_export.lora.insert`.

    Attributes:
        modules: Module path → layer, for every linear layer that accepts adapters now.
        scaling: The factor of the low-rank products: ``alpha / rank``.
        ranges: Number of activations after these layers that are no longer quantized.
        model: The model.
    """

    columns = LORA_COLUMNS

    modules: Mapping[str, LoraLayer] = field(repr=False)
    scaling: float
    ranges: int = 0
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def summary(self) -> str:
        """The result in one line."""
        taken = f"{many(len(self.modules), 'linear layer')} with inputs for adapters; "
        if self.ranges:
            return taken + f"{self.ranges} activations behind them are no longer quantized"
        return taken + "without one, the results are unchanged"


@names_model_faults("model")
def insert(
    model: ModelSource,
    select: str | Sequence[str],
    output: str | os.PathLike[str] | None = None,
    *,
    rank: int = 8,
    alpha: float | None = None,
    required: bool = False,
) -> InsertedLora:
    """Insert inputs for LoRA adapters into linear layers, so that one file serves many adapters.

    Each layer gets two inputs, named and laid out as in a PEFT checkpoint: ``<module
    path>.lora_A.weight`` of the shape (rank, inputs) and ``<module path>.lora_B.weight`` of the
    shape (outputs, rank). They are optional: their default has the rank 0, so that the results
    stay as they were. A run accepts factors of any rank. Files of ONNX Runtime's adapter format, as
    `lora.adapter` writes them, set all inputs at once. Weights and biases stay. If activations are
    quantized (QDQ), the activations after such a layer become floating point: their ranges were
    calibrated without an adapter, and would clip its changes.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        select: A selector of modules: all linear layers at or below them, or called by them.
        output: The file to write.
        rank: The rank of the adapters, for the factor ``alpha / rank``.
        alpha: PEFT's ``lora_alpha``; None for ``rank``, which is the factor 1.
        required: Insert inputs without defaults, for runtimes without optional inputs, as ONNX
            Runtime for JavaScript: every run has to pass factors, of rank 0 without an adapter.

    Returns:
        The model, and its layers that accept adapters.

    Raises:
        SelectorError: The selector cannot be parsed or matches no module.
        InputError: There is no linear layer, or one is merged with its neighbours, or accepts
            adapters already.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 8),), verbose=False)
        >>> result = htp_export.lora.insert(exported, "0")
        >>> result.modules["0"].names, result.tagged["0.lora_A"].class_name
        (('0.lora_A.weight', '0.lora_B.weight'), 'torch.nn.modules.linear.Linear')
    """
    check_target(output)
    scaling = scaling_of(rank, alpha)
    tagged = read_for_change(model)
    earlier = lora_layers(tagged)
    linears = _chosen(tagged, select)
    if again := [path for path in linears if path in earlier]:
        raise InputError(f"module {again[0]!r} takes adapters already")
    results = {linear.y for calls in linears.values() for linear in calls}
    with Edit(tagged) as edit:
        edit.add_modules({path: _modules(path, calls) for path, calls in linears.items()})
        insertion = _Insertion(edit, scaling, results, required)
        for path in counted(list(linears), "layers"):
            insertion.add(path, linears[path])
        ranges = insertion.release()
    write_lora(tagged.model.metadata_props, {**earlier, **dict.fromkeys(linears, scaling)})
    # The first version with metadata_props of nodes, which contain the tags.
    tagged.model.ir_version = max(tagged.model.ir_version, 10)
    if output is not None:
        write_model(tagged.model, output)
    layers = {
        path: LoraLayer(path, first.inputs, first.outputs, 1 + len(more), _input_names(path))
        for path, (first, *more) in linears.items()
    }
    return InsertedLora(layers, scaling, ranges, model=tagged.model)


def scaling_of(rank: int, alpha: float | None) -> float:
    """The factor of an adapter's product, ``alpha / rank``; `InputError` for other than positive numbers.

    Examples:
        >>> scaling_of(8, 16), scaling_of(8, None)
        (2.0, 1.0)
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InputError(f"rank {rank!r}: it is a whole number, 1 or more")
    if alpha is None:
        return 1.0
    if not isinstance(alpha, int | float) or not np.isfinite(alpha) or alpha <= 0:
        raise InputError(f"alpha {alpha!r}: it is a number above 0")
    return float(alpha) / rank


def _chosen(tagged: TaggedModel, select: str | Sequence[str]) -> dict[str, list[Linear]]:
    """Linear layers among the selected modules.

    Raises:
        InputError: There are none; if a module has products, the reason why it is no linear layer.
    """
    selected, problem = set(modules_within(tagged, select)), None
    linears: dict[str, list[Linear]] = {}
    for path in linear_paths(tagged):
        if path not in selected:
            continue
        try:
            linears[path] = linears_of(tagged, path)
        except NotLinearError as error:
            problem = problem or error
    if not linears:
        raise problem or InputError(
            f"there is no linear layer at or below the modules of {select!r}"
        )
    return linears


def _input_names(path: str) -> tuple[str, ...]:
    return tuple(factor_name(path, factor) for factor in FACTORS)


def _modules(path: str, calls: Sequence[Linear]) -> list[ModuleInfo]:
    """Modules of the two factors of a layer."""
    return [
        ModuleInfo(factor_module(path, factor), _CLASS, len(calls), synthetic=True)
        for factor in FACTORS
    ]


class _Insertion:
    """Adds low-rank products to the results of linear layers, in place; ``results`` are these results."""

    def __init__(
        self, edit: Edit, scaling: float, results: Container[ir.Value], required: bool
    ) -> None:
        self._edit, self._scaling, self._required = edit, scaling, required
        self._layer_results = results
        self._factors: dict[ir.DataType, ir.Value] = {}
        self._sums: dict[ir.Value, ir.Value] = {}  # result of a layer → sum that replaces it

    def add(self, path: str, calls: Sequence[Linear]) -> None:
        """Insert the products of the calls of one layer."""
        dtype = self._edit.tagged.inferred.dtype(calls[0].x) or ir.DataType.FLOAT
        sizes = {"A": (0, calls[0].inputs), "B": (calls[0].outputs, 0)}
        factors = {factor: self._input(path, factor, sizes[factor], dtype) for factor in FACTORS}
        steps = [self._product(path, linear, factors, dtype) for linear in calls]
        if not self._edit.signatures:
            return
        for position, factor in enumerate(FACTORS):
            signatures = []
            for values in steps:
                x, result = values[position], values[position + 1]
                signatures.append(Signature({"x": x.name}, (result.name,)))
            self._edit.signatures[factor_module(path, factor)] = signatures

    def _input(
        self, path: str, factor: str, shape: tuple[int, int], dtype: ir.DataType
    ) -> ir.Value:
        """Add the graph input of a factor; a size 0 in ``shape`` is the open rank."""
        name = factor_name(path, factor)
        if self._edit.names.tensors.unused(name) != name:
            raise InputError(f"the model has a tensor {name!r} already")
        graph = self._edit.graph
        if self._required:
            value = ir.Value(name=name, type=ir.TensorType(dtype))
            graph.inputs.append(value)
        else:
            value = add_zeros_input(graph, name, dtype, shape)
        value.shape = ir.Shape([f"{path}.lora_rank" if size == 0 else size for size in shape])
        return value

    def _product(
        self, path: str, linear: Linear, factors: Mapping[str, ir.Value], dtype: ir.DataType
    ) -> list[ir.Value]:
        """Insert the product for one call.

        Returns:
            Its input, the tensor between the factors, and its result.
        """
        base, uses = linear.y, list(linear.y.uses())
        x = self._input_of(linear)
        nodes: list[ir.Node] = []

        def add_node(
            op: str,
            inputs: Sequence[ir.Value],
            owner: str,
            like: ir.Value | None = None,
            **attributes: Any,
        ) -> ir.Value:
            suffix = "lora" if owner == path else owner.rpartition(".")[2]
            name = f"{base.name}_{suffix}_{op}"
            node = self._edit.node(op, inputs, Instance(owner, linear.call), name, attributes)
            nodes.append(node)
            result = node.outputs[0]
            result.name, result.type = self._edit.names.tensors.unused(name), ir.TensorType(dtype)
            result.shape = None if like is None else like.shape
            return result

        # y + scaling * (x @ A.T) @ B.T
        a_module, b_module = (factor_module(path, factor) for factor in FACTORS)
        a_transposed = add_node("Transpose", [factors["A"]], a_module, perm=[1, 0])
        down = add_node("MatMul", [x, a_transposed], a_module)
        b_transposed = add_node("Transpose", [factors["B"]], b_module, perm=[1, 0])
        up = add_node("MatMul", [down, b_transposed], b_module, base)
        scaled = up
        if self._scaling != 1:
            scaled = add_node("Mul", [up, self._scaling_constant(dtype)], path, base)
        result = add_node("Add", [base, scaled], path, base)
        producer = base.producer()
        assert producer is not None
        self._edit.graph.insert_after(producer, nodes)
        self._edit.replace_uses(base, result, uses, rest=f"{base.name}_base")
        self._sums[base] = result
        return [x, down, up]

    def _input_of(self, linear: Linear) -> ir.Value:
        """The input of the product: in floating point, and with the product of the layer before."""
        if linear.x in self._sums:
            return self._sums[linear.x]
        return linear.x if linear.x in self._layer_results else unquantized(linear.x)

    def _scaling_constant(self, dtype: ir.DataType) -> ir.Value:
        """The initializer with the scaling, one for each type."""
        if dtype not in self._factors:
            name = self._edit.names.tensors.unused("lora_scaling")
            tensor = ir.Tensor(np.array(self._scaling, dtype.numpy()), dtype=dtype, name=name)
            self._factors[dtype] = add_initializer(self._edit.graph, tensor, name, CONSTANT)
        return self._factors[dtype]

    def release(self) -> int:
        """Remove the quantization of activations that adapters change.

        Returns:
            The number of removed pairs.
        """
        named: set[str] = set()
        for signatures in self._edit.tagged.signatures.values():
            for call in signatures:
                named.update(filter(None, (*call.inputs.values(), *call.outputs)))
        return release_ranges(self._edit.graph, self._sums.values(), named)


def release_ranges(graph: ir.Graph, changed: Iterable[ir.Value], named: Collection[str]) -> int:
    """Remove QuantizeLinear and DequantizeLinear pairs that depend on ``changed``, in place; return their number.

    If the output of a pair has a name in ``named``, as the result of a module, the tensor in its
    place gets this name.

    Examples:
        >>> x, scale = ir.val("x"), ir.Value(name="scale", const_value=ir.tensor(0.1))
        >>> steps = [ir.node("QuantizeLinear", [x, scale])]
        >>> steps += [ir.node("DequantizeLinear", [steps[0].outputs[0], scale])]
        >>> steps += [ir.node("Relu", steps[1].outputs)]
        >>> graph = ir.Graph([x], steps[2].outputs, nodes=steps, initializers=[scale], opset_imports={"": 20})
        >>> release_ranges(graph, [x], ()), [node.op_type for node in graph], list(graph.initializers)
        (1, ['Relu'], [])
    """
    count = 0
    starts: dict[ir.Value | None, int] = dict.fromkeys(changed, 1)
    depending = dependence(reads_and_results(graph), starts)
    for quantize in filter(quantizes, list(graph)):
        [levels], before = quantize.outputs, quantize.inputs[0]
        consumers = [use.node for use in levels.uses()]
        is_pair = consumers and all(map(dequantizes, consumers))
        if before is None or before not in depending or levels.is_graph_output() or not is_pair:
            continue
        for dequantize in consumers:
            [after] = dequantize.outputs
            if after.name in named and before.name not in named and not before.is_graph_input():
                replace_uses(after, before)
            elif not replace_with(after, before):
                continue
            remove_unused([after])
            count += 1
    return count
