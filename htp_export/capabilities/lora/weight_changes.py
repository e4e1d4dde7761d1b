"""Changes that `lora.fuse` makes to stored tensors: products of factors are added, and whole parameters replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.lora.adapters import Adapter, LowRank, placed
from htp_export.capabilities.lora.linears import linear_paths, linears_of
from htp_export.editing.editing import add_initializer
from htp_export.errors import InputError
from htp_export.extras import install_advice
from htp_export.format import tags
from htp_export.format.recipes import Recipe, is_exact, operands_of, parameters_in, step
from htp_export.model.module_facts import stored_tensor
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import Names
from htp_export.process.progress import counted
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import operator_of
from htp_export.weights.parameter_places import WeightSources, places_in
from htp_export.weights.products import (
    Product,
    changed_when_written,
    products_of,
    readers_of,
    weight_place,
)
from htp_export.weights.rebuilding import recipes_of_stored, remade
from htp_export.weights.storing import numbers_of, store

_OPERATORS = {"convolution": ("Conv", "com.microsoft::FusedConv"), "embedding": ("Gather",)}
"""Kind of an adapted layer → operators that it is exported to; for linear layers see `linears_of`."""

_BIASED = ("Gemm", "Conv", "ConvTranspose")
"""Operators whose third input is an optional bias."""

_EARLIER = "export with optimize=False, fuse the adapter, then optimize"


def add_to_weights(
    tagged: TaggedModel, adapter: Adapter, inserted: Mapping[str, float]
) -> dict[str, LowRank]:
    """Add the products of an adapter's factors to the weights of a model, in place.

    The new weights are computed when they are written. ``inserted``: module path → scaling of
    factors that have none of their own. Returned is module path of the model → factors.

    Raises:
        InputError: The model lacks a layer, a layer has other sizes, or a weight cannot be changed.
    """
    by_path: dict[str, LowRank] = {}
    for kind in sorted({layer.kind for layer in adapter.layers.values()}):
        paths = _paths(tagged, kind)
        layers = {path: layer for path, layer in adapter.layers.items() if layer.kind == kind}
        what = f"{kind}s of the model" if kind in _OPERATORS else "linear layers of the model"
        by_path |= placed(adapter.source, layers, paths, what)
    for path in counted(list(by_path), "layers"):
        layer = by_path[path]
        scaling = scaling_of(adapter.source, path, layer, inserted.get(path))
        _add_to_weight(tagged, adapter.source, path, layer, scaling)
    return {path: by_path[path] for path in sorted(by_path, key=tags.path_order)}


def scaling_of(source: Path, path: str, layer: LowRank, inserted: float | None = None) -> float:
    """Return the scaling of a layer's factors; ``inserted`` if they have none of their own.

    Raises:
        InputError: Neither is known.
    """
    scaling = inserted if layer.scaling is None else layer.scaling
    if scaling is None:
        raise InputError(f"{source}: has no scaling for {path!r}; give the folder of PEFT")
    return scaling


def _paths(tagged: TaggedModel, kind: str) -> list[str]:
    """Modules that are layers of a kind, in the order of the module tree."""
    if kind not in _OPERATORS:
        return linear_paths(tagged)
    works = tagged.index.works
    nodes = [node for node in tagged.nodes if operator_of(node) in _OPERATORS[kind]]
    owners: set[str] = set()
    for use in products_of(tagged, nodes):
        owners.update(works[use.node].doing)
    return [path for path in tagged if path in owners]


def _uses(tagged: TaggedModel, path: str, kind: str) -> list[Product]:
    """Products of a layer with its one weight; `InputError` if there is no such weight."""
    nodes = _nodes_with_weight(tagged, path, kind)
    uses = [use for use in products_of(tagged, nodes) if use.place == weight_place(use.node)]
    if len(uses) != len(nodes) or len({use.value for use in uses}) != 1:
        raise InputError(f"module {path!r}: its weight is {_why_not(tagged, nodes)}")
    use = uses[0]
    if kind in _OPERATORS and "transposed" in use.how:
        raise InputError(
            f"module {path!r}: its weight {use.value.name!r} is in another layout than PyTorch's"
        )
    recipe = recipe_of(use.value)
    if is_exact(recipe) and _is_computed(recipe):
        parameters = ", ".join(map(repr, dict.fromkeys(parameters_in(recipe))))
        raise InputError(
            f"module {path!r}: its weight {use.value.name!r} was computed from {parameters}; {_EARLIER}"
        )
    return uses


def _nodes_with_weight(tagged: TaggedModel, path: str, kind: str) -> list[ir.Node]:
    """Nodes that do the work of a layer with its weight, one for each call."""
    if kind not in _OPERATORS:
        return [call.product for call in linears_of(tagged, path)]
    works = tagged.index.works
    nodes = [node for node in tagged[path].nodes if operator_of(node) in _OPERATORS[kind]]
    return [node for node in nodes if path in works[node].doing]


def _is_computed(recipe: Recipe) -> bool:
    """Whether a recipe merges parameters, or computes new values from them."""
    return any(not {"merged", "computed"}.isdisjoint(place.how) for place in places_in(recipe))


def check_sizes(source: Path, path: str, layer: LowRank, wanted: Sequence[int | None]) -> None:
    """Refuse (`InputError`) factors whose product has another shape than ``wanted``: (outputs, inputs, ...)."""
    sizes = [layer.b.shape[0], *layer.a.shape[1:]]
    if sizes != list(wanted):
        inputs, model_inputs = (" x ".join(map(str, shape[1:])) for shape in (sizes, wanted))
        maps = f"maps {inputs} numbers to {sizes[0]}, and that of the model {model_inputs} to {wanted[0]}"
        raise InputError(f"{source}: module {path!r} {maps}")


def _add_to_weight(
    tagged: TaggedModel, source: Path, path: str, layer: LowRank, scaling: float
) -> None:
    """Add the product of the factors to the weight of one layer."""
    use = _uses(tagged, path, layer.kind)[0]
    value = _own(tagged, use.value, path, f"{path}.weight" if path else "weight")
    tensor = numbers_of(value)
    shape = tuple(tensor.shape.numpy())
    # Stored as (inputs, outputs), as MatMul needs it.
    is_transposed = layer.kind == "linear" and use.channels > use.reduced
    layer_shape = shape[::-1] if is_transposed or layer.kind == "embedding" else shape
    check_sizes(source, path, layer, layer_shape)
    if layer.kind == "convolution" and (groups := use.node.attributes.get_int("group", 1)) != 1:
        raise InputError(
            f"module {path!r} has {groups} groups; PEFT merges no adapter of such a convolution"
        )
    alpha = np.float32(use.node.attributes.get_float("alpha", 1.0))

    def added(weight: Array) -> Array:
        # Gemm multiplies the product by alpha: the sum is of the weight that PyTorch has.
        torch_weight = (weight.T if is_transposed else weight).astype(np.float32) * alpha
        total = merged(torch_weight, layer, scaling) / alpha
        return (total.T if is_transposed else total).astype(weight.dtype)

    store(value, changed_when_written(tensor, added, step("computed", recipe_of(value), "lora")))


def _own(tagged: TaggedModel, value: ir.Value, path: str, name: str) -> ir.Value:
    """An initializer that only the nodes of a module consume: ``value`` itself, or a copy of it.

    Raises:
        InputError: One node consumes it for this module and for others.
    """
    uses = list(value.uses())
    module_uses = []
    is_shared = value.is_graph_output()
    for node, place in uses:
        within = [tags.is_under(owner, path) for owner in tagged.owners_of(node)]
        if any(within):
            module_uses.append((node, place))
            is_shared = is_shared or not all(within)
    if is_shared:
        others = _other_owners(tagged, value, path)
        raise InputError(
            f"module {path!r}: its weight {value.name!r} is also that of {others or 'an output'}"
        )
    if len(module_uses) in (0, len(uses)):
        return value
    graph = value.graph
    assert graph is not None
    copy = add_initializer(
        graph, numbers_of(value), Names(tagged.model).tensors.unused(name), recipe_of(value)
    )
    for node, place in module_uses:
        node.replace_input_with(place, copy)
    return copy


def _other_owners(tagged: TaggedModel, value: ir.Value, path: str) -> str:
    """Owners outside a module of the nodes that consume a tensor, as a list in an error."""
    owners: dict[str, None] = {}
    for node in readers_of(value):
        if node is not None:
            owners.update(dict.fromkeys(tagged.owners_of(node)))
    return ", ".join(repr(owner) for owner in owners if not tags.is_under(owner, path))


def _why_not(tagged: TaggedModel, products: Iterable[ir.Node]) -> str:
    """Reason why an adapter cannot be added to the weight of these products."""
    sources = WeightSources(tagged)
    for product in products:
        weight = product.inputs[weight_place(product)]
        for source in sources.of(weight) if weight is not None else ():
            tensor = stored_tensor(source.tensor)
            if tensor is not None and tensor.dtype.is_integer():
                where = f"{operator_of(product)} {product.name!r}"
                return f"quantized ({where}); fuse the adapter before the model is quantized, or use lora.insert"
    return "not stored as one tensor of floating point"


def replace_parameters(tagged: TaggedModel, adapter: Adapter) -> list[str]:
    """Replace the stored tensors of parameters that were trained as a whole, in place.

    Parameters of modules that compute nothing in this model are skipped.

    Returns:
        The names of the replaced parameters.

    Raises:
        InputError: The model lacks a parameter, or it has another shape, or is merged with others.
    """
    if not adapter.parameters:
        return []
    stored = _stored_parameters(tagged.model)
    declared = tagged.declared or {}
    names = {**dict.fromkeys(declared), **dict.fromkeys(stored)}
    # Integers are counters, as num_batches_tracked: not trained.
    trained = {
        name: array for name, array in adapter.parameters.items() if array.dtype.kind not in "iu"
    }
    by_name = placed(adapter.source, trained, names, "parameters of the model", "parameter")
    # First name of a tied parameter → all its names: a recipe may contain any of them.
    tied: dict[str, list[str]] = {}
    for parameter in declared.values():
        tied.setdefault(parameter.first, []).append(parameter.name)
    replaced = []
    for name, array in by_name.items():
        aliases = [name]
        if name in declared:
            aliases = tied[declared[name].first]
            shape = declared[name].shape
            if tuple(array.shape) != shape:
                sizes = f"{list(array.shape)}, and that of the model {list(shape)}"
                raise InputError(f"{adapter.source}: parameter {name!r} has the shape {sizes}")
        values: dict[ir.Value, None] = {}
        for alias in aliases:
            values.update(dict.fromkeys(stored.get(alias, ())))
        count = sum(_replace(tagged, value, name, array, aliases) for value in values)
        if not count:
            if _computes_nothing(tagged, tags.parent_path(name) or ""):
                continue
            if name not in declared or not _add_bias(tagged, name, array):
                raise InputError(
                    f"{adapter.source}: parameter {name!r} has no place of its own in the model"
                )
        replaced.append(name)
    return replaced


def _stored_parameters(model: ir.Model) -> dict[str, list[ir.Value]]:
    """Parameter → initializers that were computed from it, according to their recipes."""
    stored: dict[str, list[ir.Value]] = {}
    for value, recipe in recipes_of_stored(model).items():
        for name in dict.fromkeys(parameters_in(recipe)):
            stored.setdefault(name, []).append(value)
    return stored


def _computes_nothing(tagged: TaggedModel, path: str) -> bool:
    """Whether a module is dead, or is never called."""
    module = tagged.hierarchy.get(path)
    return module is not None and (module.fate.is_needless or not module.fate.ran)


def _add_bias(tagged: TaggedModel, name: str, array: Array) -> bool:
    """Add a bias to the products of its module, because exporters drop a bias of zeros; return whether it was added."""
    path, works = tags.parent_path(name) or "", tagged.index.works
    nodes = [
        node
        for node in tagged[path].nodes
        if operator_of(node) in _BIASED and works[node].doing == (path,)
    ]
    uses = [use for use in products_of(tagged, nodes) if use.place == 1]
    have_bias = any(len(node.inputs) > 2 and node.inputs[2] is not None for node in nodes)
    if not uses or len(uses) != len(nodes) or array.ndim != 1 or have_bias:
        return False
    graph = uses[0].value.graph
    assert graph is not None
    tensor = ir.tensor(array.astype(numbers_of(uses[0].value).dtype.numpy()))
    bias = add_initializer(
        graph, tensor, Names(tagged.model).tensors.unused(name), step("computed", name, "lora")
    )
    for use in uses:
        use.node.resize_inputs(3)
        use.node.replace_input_with(2, bias)
    return True


def _replace(
    tagged: TaggedModel, value: ir.Value, name: str, array: Array, aliases: Sequence[str]
) -> bool:
    """Replace one stored tensor, or the copy of it that the parameter's module consumes; return whether it does."""
    recipe = recipe_of(value)
    is_equal = isinstance(recipe, list) and recipe[0] == "equal"
    module = tags.parent_path(name) or ""
    # Other modules may consume the tensor, too: equal parameters are stored once.
    if is_equal or len(aliases) > 1:
        if not _is_consumed_by(tagged, value, module):
            return False
        value = _own(tagged, value, module, name)
    if isinstance(recipe, list) and is_equal:
        operands = operands_of(recipe)
        recipe = next(part for part in operands if not set(aliases).isdisjoint(parameters_in(part)))
    others = [part for part in dict.fromkeys(parameters_in(recipe)) if part not in aliases]
    if others or not is_exact(recipe):
        if others:
            why = f"merged with {', '.join(map(repr, others[:3]))}"
        else:
            why = f"computed ({recipe[-1]})"  # type: ignore[index]
        raise InputError(f"parameter {name!r}: its tensor {value.name!r} is {why}; {_EARLIER}")
    tensor = value.const_value
    assert tensor is not None
    if tensor.dtype.is_floating_point():
        array = array.astype(tensor.dtype.numpy())
    rebuilt = remade(tensor, recipe, dict.fromkeys(aliases, array))
    value.const_value = recorded(rebuilt, step("computed", recipe, "lora"))
    return True


def _is_consumed_by(tagged: TaggedModel, value: ir.Value, module: str) -> bool:
    """Whether a node of a module, or of a module below it, consumes a tensor."""
    owners = chain.from_iterable(tagged.owners_of(node) for node, _ in value.uses())
    return any(tags.is_under(owner, module) for owner in owners)


def require_peft(adapter: Adapter) -> None:
    """Raise an `InputError` if PEFT has to compute new weights, and is not installed."""
    needing = [path for path, layer in adapter.layers.items() if not layer.is_plain]
    if needing and find_spec("peft") is None:
        raise InputError(
            f"{adapter.source}: module {needing[0]!r} has more than two factors of a linear layer, which needs PEFT; "
            f"{install_advice('peft')}"
        )


def merged(weight: Array, layer: LowRank, scaling: float) -> Array:
    """Merge factors into a float weight, as PEFT's ``merge_and_unload`` does.

    ``weight`` has PyTorch's layout: (outputs, inputs), (outputs, inputs, kernel size, ...) or
    (rows, size). ``scaling`` multiplies the product of the factors.

    Examples:
        >>> merged(np.eye(2, dtype=np.float32), LowRank(np.ones((1, 2)), np.ones((2, 1))), 0.5).tolist()
        [[1.5, 0.5], [0.5, 1.5]]
    """
    if not layer.is_plain:
        return _by_peft(weight, layer, scaling)
    product = layer.b.astype(np.float32) @ layer.a.astype(np.float32)
    total: Array = weight + product * np.float32(scaling)
    return total


def _by_peft(weight: Array, layer: LowRank, scaling: float) -> Array:
    """Merge factors with a layer of PEFT around a PyTorch layer with the weight."""
    import torch

    # PEFT initializes random factors before these replace them: keep the user's random state.
    with quiet("peft"), torch.random.fork_rng(devices=[]):
        import peft

        rank = layer.a.shape[0]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=scaling * rank,
            target_modules=["layer"],
            use_dora=layer.magnitude is not None,
            init_lora_weights=layer.start or True,  # type: ignore[arg-type]
        )
        holder = peft.inject_adapter_in_model(
            config, torch.nn.ModuleDict({"layer": _base(weight, layer.kind)})
        )
        wrapper: Any = holder["layer"]  # type: ignore[index]
        key = "lora_embedding_{}" if layer.kind == "embedding" else "lora_{}.weight"
        state = {
            f"layer.{key.format('A')}": _tensor(layer.a),
            f"layer.{key.format('B')}": _tensor(layer.b),
        }
        if layer.magnitude is not None:
            # One number for each output channel, in the rank of the weight of a convolution.
            shape = (1, -1, *[1] * (weight.ndim - 2)) if weight.ndim > 2 else (-1,)
            state["layer.lora_magnitude_vector"] = _tensor(layer.magnitude.reshape(shape))
        keys: Any = peft.set_peft_model_state_dict(holder, state)
        assert not keys.unexpected_keys, keys
        wrapper.merge()
        total: Array = wrapper.get_base_layer().weight.detach().numpy()
    return total


def _base(weight: Array, kind: str) -> Any:
    """A PyTorch layer with a weight; merging does not depend on its other settings."""
    from torch import nn

    first, second, *kernel = weight.shape
    base: Any
    if kind == "embedding":
        base = nn.Embedding(first, second, device="meta")
    elif kind == "linear":
        base = nn.Linear(second, first, bias=False, device="meta")
    else:
        base = getattr(nn, f"Conv{len(kernel)}d")(
            second, first, tuple(kernel), bias=False, device="meta"
        )
    base.weight = nn.Parameter(_tensor(weight))
    return base


def _tensor(array: Array) -> Any:
    import torch

    return torch.tensor(array.astype(np.float32))
