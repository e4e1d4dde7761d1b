"""`lora.insert`: inputs for low-rank adapters in the linear layers of a model."""

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
from htp_export.reporting.columns import Column
from htp_export.reporting.tables import ModuleTable
from htp_export.shapes.operator_kinds import dequantizes, quantizes

_CLASS = "torch.nn.modules.linear.Linear"


@dataclass(frozen=True)
class LoraLayer:
    """A linear layer that takes adapters.

    Attributes:
        path: The module.
        inputs: Size of what it takes.
        outputs: Size of what it gives.
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
        modules: Module path → the layer, for every linear layer that takes adapters now.
        scaling: The factor by which the low-rank products are multiplied: ``alpha / rank``.
        ranges: How many activations behind these layers are no longer quantized.
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
        taken = f"{len(self.modules)} linear layers take adapters; "
        if self.ranges:
            return taken + f"{self.ranges} activations behind them are no longer quantized"
        return taken + "without one, the model computes what it did before"


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
    """Give linear layers inputs for LoRA adapters, so that one file serves many of them.

    Each layer gets two inputs, named and laid out as in a PEFT checkpoint: ``<module
    path>.lora_A.weight`` of the shape (rank, inputs) and ``<module path>.lora_B.weight`` of the
    shape (outputs, rank). They are optional: their default has the rank 0, so that the model
    computes what it did before. The rank of what is given may be any. Files of ONNX Runtime's
    adapter format, as `lora.adapter` writes them, set all of them at once. Weights and biases stay.
    In a model whose activations are quantized (QDQ), those behind such a layer are not any longer:
    their ranges were calibrated without an adapter, and would clip what it changes.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        select: A selector of modules: all linear layers at or below them, and those that they call.
        output: The file to write.
        rank: The rank of the adapters, for the factor ``alpha / rank``.
        alpha: PEFT's ``lora_alpha``; None for ``rank``, which is the factor 1.
        required: Without defaults, for runtimes that give no optional inputs, as ONNX Runtime's for
            JavaScript: every run has to be given factors, of the rank 0 where there is no adapter.

    Returns:
        The model, and its layers that take adapters.

    Raises:
        SelectorError: The selector cannot be read or matches no module.
        InputError: There is no linear layer, or one is merged with its neighbours, or takes
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
    known = lora_layers(tagged)
    linears = _chosen(tagged, select)
    if again := [path for path in linears if path in known]:
        raise InputError(f"module {again[0]!r} takes adapters already")
    results = {linear.y for calls in linears.values() for linear in calls}
    with Edit(tagged) as edit:
        edit.add_modules({path: _modules(path, calls) for path, calls in linears.items()})
        insertion = _Insertion(edit, scaling, results, required)
        for path in counted(list(linears), "layers"):
            insertion.add(path, linears[path])
        ranges = insertion.release()
    write_lora(tagged.model.metadata_props, {**known, **dict.fromkeys(linears, scaling)})
    tagged.model.ir_version = max(tagged.model.ir_version, 10)
    if output is not None:
        write_model(tagged.model, output)
    layers = {
        path: LoraLayer(path, first.inputs, first.outputs, 1 + len(more), _input_names(path))
        for path, (first, *more) in linears.items()
    }
    return InsertedLora(layers, scaling, ranges, model=tagged.model)


def scaling_of(rank: int, alpha: float | None) -> float:
    """The factor of the product of an adapter; `InputError` if it cannot be one.

    Examples:
        >>> scaling_of(8, 16), scaling_of(8, None)
        (2.0, 1.0)
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InputError(f"rank {rank!r}: it is a whole number, 1 or more")
    if alpha is not None and not (
        isinstance(alpha, int | float) and np.isfinite(alpha) and alpha > 0
    ):
        raise InputError(f"alpha {alpha!r}: it is a number above 0")
    return 1.0 if alpha is None else float(alpha) / rank


def _chosen(tagged: TaggedModel, select: str | Sequence[str]) -> dict[str, list[Linear]]:
    """The linear layers among modules; without any, an `InputError` says why the first one with a product is none."""
    wanted, problem = set(modules_within(tagged, select)), None
    linears: dict[str, list[Linear]] = {}
    for path in filter(wanted.__contains__, linear_paths(tagged)):
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
    """The modules of the two factors of a layer."""
    return [
        ModuleInfo(factor_module(path, factor), _CLASS, len(calls), synthetic=True)
        for factor in FACTORS
    ]


class _Insertion:
    """Puts low-rank products beside linear layers of a model, in place; ``results`` are the results of these layers."""

    def __init__(
        self, edit: Edit, scaling: float, results: Container[ir.Value], required: bool
    ) -> None:
        self._edit, self._scaling, self._given, self._required = edit, scaling, results, required
        self._factors: dict[ir.DataType, ir.Value] = {}
        self._results: dict[ir.Value, ir.Value] = {}  # result of a layer → the sum in its place

    def add(self, path: str, calls: Sequence[Linear]) -> None:
        """Insert the products of the calls of one layer."""
        dtype = self._edit.tagged.inferred.dtype(calls[0].x) or ir.DataType.FLOAT
        sizes = {"A": (0, calls[0].inputs), "B": (calls[0].outputs, 0)}
        factors = {factor: self._input(path, factor, sizes[factor], dtype) for factor in FACTORS}
        steps = [self._product(path, linear, factors, dtype) for linear in calls]
        if not self._edit.signatures:
            return
        for at, factor in enumerate(FACTORS):
            self._edit.signatures[factor_module(path, factor)] = [
                Signature({"x": values[at].name}, (values[at + 1].name,)) for values in steps
            ]

    def _input(
        self, path: str, factor: str, shape: tuple[int, int], dtype: ir.DataType
    ) -> ir.Value:
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
        """Add the product for one call.

        Returns:
            Its input, the tensor between the factors, and its result.
        """
        base, uses = linear.y, list(linear.y.uses())
        x = self._results.get(
            linear.x, linear.x if linear.x in self._given else unquantized(linear.x)
        )
        nodes: list[ir.Node] = []

        def made(
            op: str,
            inputs: Sequence[ir.Value],
            owner: str,
            like: ir.Value | None = None,
            **facts: Any,
        ) -> ir.Value:
            name = f"{base.name}_{owner.rpartition('.')[2] if owner != path else 'lora'}_{op}"
            nodes.append(self._edit.node(op, inputs, Instance(owner, linear.call), name, facts))
            result = nodes[-1].outputs[0]
            result.name, result.type = self._edit.names.tensors.unused(name), ir.TensorType(dtype)
            result.shape = None if like is None else like.shape
            return result

        first, second = (factor_module(path, factor) for factor in FACTORS)
        down = made("MatMul", [x, made("Transpose", [factors["A"]], first, perm=[1, 0])], first)
        up = made(
            "MatMul", [down, made("Transpose", [factors["B"]], second, perm=[1, 0])], second, base
        )
        scaled = up if self._scaling == 1 else made("Mul", [up, self._factor(dtype)], path, base)
        result = made("Add", [base, scaled], path, base)
        producer = base.producer()
        assert producer is not None
        self._edit.graph.insert_after(producer, nodes)
        self._edit.replace_uses(base, result, uses, rest=f"{base.name}_base")
        self._results[base] = result
        return [x, down, up]

    def _factor(self, dtype: ir.DataType) -> ir.Value:
        if dtype not in self._factors:
            name = self._edit.names.tensors.unused("lora_scaling")
            tensor = ir.Tensor(np.array(self._scaling, dtype.numpy()), dtype=dtype, name=name)
            self._factors[dtype] = add_initializer(self._edit.graph, tensor, name, CONSTANT)
        return self._factors[dtype]

    def release(self) -> int:
        """Remove the quantization of activations that adapters change.

        Returns:
            The number of pairs that were removed.
        """
        calls = [call for each in self._edit.tagged.signatures.values() for call in each]
        named = {name for call in calls for name in (*call.inputs.values(), *call.outputs) if name}
        return release_ranges(self._edit.graph, self._results.values(), named)


def release_ranges(graph: ir.Graph, changed: Iterable[ir.Value], named: Collection[str]) -> int:
    """Take out the pairs of ``QuantizeLinear`` and ``DequantizeLinear`` that depend on values, in place; how many.

    Names of ``named`` are kept where a pair has one of them behind it, as those of results of
    modules.

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
        readers = [use.node for use in levels.uses()]
        is_pair = readers and all(map(dequantizes, readers))
        if before is None or before not in depending or levels.is_graph_output() or not is_pair:
            continue
        for [after] in [node.outputs for node in readers]:
            if after.name in named and before.name not in named and not before.is_graph_input():
                replace_uses(after, before)
            elif not replace_with(after, before):
                continue
            remove_unused([after])
            count += 1
    return count
