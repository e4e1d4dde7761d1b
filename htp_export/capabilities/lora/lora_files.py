"""`lora.adapter` converts an adapter for a model with LoRA inputs; `lora.fuse` adds one to the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.alignment.origin_map import renew_map
from htp_export.capabilities.lora.adapters import (
    LowRank,
    arrays_of,
    placed,
    read_adapter,
    require_switchable,
    write_adapter,
)
from htp_export.capabilities.lora.linears import factor_inputs, lora_layers
from htp_export.capabilities.lora.weight_changes import (
    add_to_weights,
    check_sizes,
    replace_parameters,
    require_peft,
)
from htp_export.editing.edit import Edit
from htp_export.editing.flattening import read_for_change
from htp_export.editing.submodels import remove_unused
from htp_export.errors import InputError
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.targets import Kind, check_target, files_of
from htp_export.format import tags
from htp_export.format.model_metadata import lora_modules, write_lora
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, TaggedResult, load
from htp_export.reporting.result import Result


@dataclass(frozen=True)
class LoraAdapter(Result):
    """The result of `htp_export.lora.adapter`.

    Attributes:
        file: The written file; None without one.
        ranks: Module path → rank of its factors.
        arrays: Name of an input of the model → factor, to pass to a run by hand.
    """

    file: Path | None
    ranks: Mapping[str, int]
    arrays: Mapping[str, Any] = field(repr=False)

    @property
    def summary(self) -> str:
        """The result in one line."""
        ranks = sorted(set(self.ranks.values()))
        where = f" -> {self.file}" if self.file else ""
        return f"{len(self.ranks)} linear layers, rank {', '.join(map(str, ranks))}{where}"


@dataclass(frozen=True)
class FusedLora(TaggedResult):
    """The result of `htp_export.lora.fuse`.

    Attributes:
        ranks: Module path → rank of the product that was added to its weight.
        parameters: Parameters that were replaced as a whole: biases, and parameters of
            ``modules_to_save``.
        model: The model.
    """

    ranks: Mapping[str, int]
    parameters: Sequence[str] = ()
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def summary(self) -> str:
        """The result in one line."""
        replaced = f"; {len(self.parameters)} parameters are replaced" if self.parameters else ""
        return f"an adapter is added to the weights of {len(self.ranks)} layers{replaced}"

    def tag_lines(self) -> tuple[str, ...]:
        """No lines: the tags are unchanged."""
        return ()


@names_model_faults("model")
def adapter(
    model: ModelSource,
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
) -> LoraAdapter:
    """Convert an adapter of PEFT for a model with the inputs of `lora.insert`.

    The file has ONNX Runtime's adapter format. ``onnxruntime.LoraAdapter().Load(file)`` loads it,
    and ``RunOptions.add_active_adapter`` selects it for a run. Layers that the adapter does not
    name are unchanged. If its scaling (``lora_alpha`` over the rank) differs from that of the
    model, ``lora_B`` is multiplied by the ratio.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        adapter: A folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        output: The file to write.

    Returns:
        The factors, under the names of the inputs of the model.

    Raises:
        InputError: The model has no inputs for adapters, or lacks modules or sizes of the adapter.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 8),), verbose=False)
        >>> htp_export.lora.adapter(htp_export.lora.insert(exported, "0"), "nowhere")
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: nowhere: there is no such adapter
    """
    check_target(output, Kind.ADAPTER, files_of(adapter))
    tagged = load(model)
    scalings = lora_layers(tagged)
    if not scalings:
        raise InputError(
            "the model takes no adapters; lora.insert adds inputs for them to its linear layers"
        )
    read = read_adapter(adapter)
    require_switchable(read)
    by_path = placed(read.source, read.layers, scalings, "layers that take adapters")
    layers = {}
    for path, layer in by_path.items():
        a, b = factor_inputs(tagged.model.graph, path)
        check_sizes(read.source, path, layer, [_size(b, 0), _size(a, 1)])
        dtype = (a.dtype or ir.DataType.FLOAT).numpy()
        scaled = layer.b
        if layer.scaling is not None and layer.scaling != scalings[path]:
            ratio = layer.scaling / scalings[path]
            scaled = layer.b.astype(np.float32) * np.float32(ratio)
        layers[path] = LowRank(layer.a.astype(dtype), scaled.astype(dtype))
    if output is not None:
        write_adapter(layers, Path(output))
    ranks = {path: layer.a.shape[0] for path, layer in layers.items()}
    return LoraAdapter(None if output is None else Path(output), ranks, arrays_of(layers))


@names_model_faults("model")
def fuse(
    model: ModelSource,
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
) -> FusedLora:
    """Add an adapter to the weights of a model, as PEFT's ``merge_and_unload`` does.

    LoRA and DoRA of linear layers, convolutions and embeddings are supported. Trained biases and
    ``modules_to_save`` replace the stored tensors. All but LoRA of linear layers needs PEFT (``pip
    install "htp-export[lora]"``). A weight that other modules share, such as a tied embedding, is
    copied first, so that the other modules keep the old weight.

    The nodes and inputs of `lora.insert`, if there are any, are removed, so that the model has its
    original nodes again. New weights are computed when they are written, one at a time.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        adapter: A folder with ``adapter_config.json`` and ``adapter_model.safetensors``; or, for a
            model with the inputs of `lora.insert`, a file of ONNX Runtime's adapter format.
        output: The file to write.

    Returns:
        The model, and the layers that were changed.

    Raises:
        InputError: The model lacks modules or sizes of the adapter, or a weight is quantized, or
            merged with others, or PEFT is needed and not installed.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 8),), verbose=False)
        >>> htp_export.lora.fuse(exported, "nowhere")
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: nowhere: there is no such adapter
    """
    check_target(output, reads=files_of(adapter))
    adapter_read = read_adapter(adapter)
    require_peft(adapter_read)
    tagged = read_for_change(model)
    tagged.require_tags()
    external = has_external_data(tagged.model)
    had_map = tags.MAP in tagged.model.metadata_props
    inserted = lora_layers(tagged)
    if inserted:
        tagged = _without_lora(tagged, inserted)
    # Parameters first: PEFT may save an embedding as a whole, and also factors to add to it.
    parameters = replace_parameters(tagged, adapter_read)
    layers = add_to_weights(tagged, adapter_read, inserted)
    renew_map(tagged.model, had_map=had_map)
    if output is not None:
        write_model(tagged.model, output, True if external else None)
    ranks = {path: layer.a.shape[0] for path, layer in layers.items()}
    return FusedLora(ranks, parameters, model=tagged.model)


def _without_lora(tagged: TaggedModel, layers: Mapping[str, float]) -> TaggedModel:
    """Remove all LoRA layers from a model, with their modules."""
    with Edit(tagged) as edit:
        for path in layers:
            _remove(edit, path)
        edit.remove_modules(lora_modules(tagged.model.metadata_props))
    write_lora(tagged.model.metadata_props, {})
    return tagged


def _remove(edit: Edit, path: str) -> None:
    """Remove the LoRA layer of a module from a graph; the module's results keep their names.

    Raises:
        InputError: The graph lacks the nodes of `lora.insert`, as after an optimizer.
    """
    graph = edit.graph
    factors = factor_inputs(graph, path)
    lora_nodes = _derived(factors[0])
    # Sum of a layer's result and its product → the layer's result.
    bases: dict[ir.Node, ir.Value] = {}
    for node in lora_nodes:
        if node.op_type != "Add":
            continue
        for value in node.inputs:
            if value is not None and value.producer() not in lora_nodes:
                bases[node] = value
    if not bases:
        raise InputError(
            f"module {path!r}: the nodes of its LoRA layer were changed by another tool"
        )
    for join, base in bases.items():
        edit.replace_uses(join.outputs[0], base)
        remove_unused(join.outputs)
    for factor in factors:
        if factor.uses():
            raise InputError(f"module {path!r}: {factor.name!r} is read outside of its LoRA layer")
        graph.inputs.remove(factor)
        graph.initializers.pop(str(factor.name), None)


def _derived(value: ir.Value) -> dict[ir.Node, None]:
    """Nodes that depend on a factor, up to and including the Add nodes that end the LoRA layer."""
    nodes: dict[ir.Node, None] = {}
    waiting = [value]
    while waiting:
        for use in waiting.pop().uses():
            if use.node not in nodes:
                nodes[use.node] = None
                if use.node.op_type != "Add":
                    waiting += use.node.outputs
    return nodes


def _size(value: ir.Value, axis: int) -> int | None:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None
