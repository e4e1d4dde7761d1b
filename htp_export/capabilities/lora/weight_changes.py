"""What `lora.fuse` does to stored tensors: products, computed by PEFT where needed, are added; parameters replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.lora.adapters import Adapter, LowRank, placed
from htp_export.capabilities.lora.linears import linear_paths, linears_of
from htp_export.editing.editing import add_initializer
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.recipes import is_exact, operands_of, parameters_in, step
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
from htp_export.weights.rebuilding import remade
from htp_export.weights.storing import numbers_of, store

_OPERATORS = {"convolution": ("Conv", "com.microsoft::FusedConv"), "embedding": ("Gather",)}
"""Kind of a layer of an adapter → what such a layer becomes; for linear ones see `linears_of`."""

_BIASED = ("Gemm", "Conv", "ConvTranspose")
"""Operators whose third input is a bias, which may be missing."""

_EARLIER = "export with optimize=False, fuse the adapter, then optimize"


def add_to_weights(
    tagged: TaggedModel, adapter: Adapter, inserted: Mapping[str, float]
) -> dict[str, LowRank]:
    """Add what an adapter's factors give to the weights of a model, in place; they are computed when they are written.

    ``inserted``: module path → the scaling that factors without one have. Returns module path of
    the model → factors; a layer or size that the model does not have, or a weight that cannot be
    changed, is an InputError.
    """
    found: dict[str, LowRank] = {}
    for kind in sorted({layer.kind for layer in adapter.layers.values()}):
        paths = _paths(tagged, kind)
        layers = {path: layer for path, layer in adapter.layers.items() if layer.kind == kind}
        what = f"{kind}s of the model" if kind in _OPERATORS else "linear layers of the model"
        found |= placed(adapter.source, layers, paths, what)
    for path in counted(list(found), "layers"):
        layer = found[path]
        scaling = inserted.get(path) if layer.scaling is None else layer.scaling
        if scaling is None:
            raise InputError(
                f"{adapter.source}: gives no scaling for {path!r}; give the folder of PEFT"
            )
        _add_to_weight(tagged, adapter.source, path, layer, scaling)
    return {path: found[path] for path in sorted(found, key=tags.path_order)}


def _paths(tagged: TaggedModel, kind: str) -> list[str]:
    """The modules that are layers of a kind, in the order of the tree."""
    if kind not in _OPERATORS:
        return linear_paths(tagged)
    works, nodes = (
        tagged.index.works,
        [node for node in tagged.nodes if operator_of(node) in _OPERATORS[kind]],
    )
    owners = {path for use in products_of(tagged, nodes) for path in works[use.node].doing}
    return [path for path in tagged if path in owners]


def _uses(tagged: TaggedModel, path: str, kind: str) -> list[Product]:
    """The products of a layer with its one weight; `InputError` if there is no such weight."""
    if kind in _OPERATORS:
        works, within = tagged.index.works, tagged[path].nodes
        nodes = [
            node
            for node in within
            if operator_of(node) in _OPERATORS[kind] and path in works[node].doing
        ]
    else:
        nodes = [call.product for call in linears_of(tagged, path)]
    uses = [use for use in products_of(tagged, nodes) if use.place == weight_place(use.node)]
    if len(uses) != len(nodes) or len({use.value for use in uses}) != 1:
        raise InputError(f"module {path!r}: its weight is {_why_not(tagged, nodes)}")
    use = uses[0]
    if kind in _OPERATORS and "transposed" in use.how:
        raise InputError(
            f"module {path!r}: its weight {use.value.name!r} is in another layout than PyTorch's"
        )
    recipe = recipe_of(use.value)
    if is_exact(recipe) and any(
        word in ("merged", "computed") for place in places_in(recipe) for word in place.how
    ):
        others = ", ".join(map(repr, dict.fromkeys(parameters_in(recipe))))
        raise InputError(
            f"module {path!r}: its weight {use.value.name!r} was computed of {others}; {_EARLIER}"
        )
    return uses


def check_sizes(source: Path, path: str, layer: LowRank, wanted: Sequence[int | None]) -> None:
    """Refuse (`InputError`) factors for another weight than one of (outputs, inputs, ...)."""
    sizes = [layer.b.shape[0], *layer.a.shape[1:]]
    if sizes != list(wanted):
        given, taken = (" x ".join(map(str, each[1:])) for each in (sizes, wanted))
        maps = f"maps {given} numbers to {sizes[0]}, and that of the model {taken} to {wanted[0]}"
        raise InputError(f"{source}: module {path!r} {maps}")


def _add_to_weight(
    tagged: TaggedModel, source: Path, path: str, layer: LowRank, scaling: float
) -> None:
    """Change the weight of one layer."""
    uses = _uses(tagged, path, layer.kind)
    use = uses[0]
    value = _own(tagged, use.value, path, f"{path}.weight" if path else "weight")
    tensor = numbers_of(value)
    shape = tuple(tensor.shape.numpy())
    is_turned = layer.kind == "linear" and use.channels > use.reduced
    of_layer = shape[::-1] if is_turned or layer.kind == "embedding" else shape
    check_sizes(source, path, layer, of_layer)
    if layer.kind == "convolution" and (groups := use.node.attributes.get_int("group", 1)) != 1:
        raise InputError(
            f"module {path!r} has {groups} groups; PEFT merges no adapter of such a convolution"
        )
    alpha = np.float32(use.node.attributes.get_float("alpha", 1.0))

    def added(weight: Array) -> Array:
        as_in_torch = (weight.T if is_turned else weight).astype(np.float32) * alpha
        total = merged(as_in_torch, layer, scaling) / alpha
        return (total.T if is_turned else total).astype(weight.dtype)

    store(value, changed_when_written(tensor, added, step("computed", recipe_of(value), "lora")))


def _own(tagged: TaggedModel, value: ir.Value, path: str, name: str) -> ir.Value:
    """A stored tensor that no other module reads: itself, or a copy for the nodes of a module.

    Raises:
        InputError: One node reads it for this module and for others.
    """
    readers = [
        (node, [tags.is_under(owner, path) for owner in tagged.owners_of(node)])
        for node, _ in value.uses()
    ]
    if value.is_graph_output() or any(any(within) and not all(within) for _, within in readers):
        others = {
            owner: None
            for node in readers_of(value)
            if node is not None
            for owner in tagged.owners_of(node)
        }
        listed = ", ".join(repr(owner) for owner in others if not tags.is_under(owner, path))
        raise InputError(
            f"module {path!r}: its weight {value.name!r} is also that of {listed or 'an output'}"
        )
    mine = [
        (node, place)
        for (node, place), (_, within) in zip(value.uses(), readers, strict=True)
        if any(within)
    ]
    if len(mine) in (0, len(readers)):
        return value
    graph = value.graph
    assert graph is not None
    copy = add_initializer(
        graph, numbers_of(value), Names(tagged.model).tensors.unused(name), recipe_of(value)
    )
    for node, place in mine:
        node.replace_input_with(place, copy)
    return copy


def _why_not(tagged: TaggedModel, products: Iterable[ir.Node]) -> str:
    """Why nothing can be added to the weight of a layer."""
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
    """Replace the stored tensors of parameters that were trained as a whole, in place; the names of these.

    Those of modules that compute nothing in this model have no place, and are left out.

    Raises:
        InputError: A parameter is none of the model's, or has another size, or is merged with
            others.
    """
    if not adapter.parameters:
        return []
    stored: dict[str, list[ir.Value]] = {}
    for graph in tagged.model.graphs():
        for value in graph.initializers.values():
            for name in dict.fromkeys(parameters_in(recipe_of(value))):
                stored.setdefault(name, []).append(value)
    declared = tagged.declared or {}
    names = {**dict.fromkeys(declared), **dict.fromkeys(stored)}
    # counters
    trained = {
        name: array for name, array in adapter.parameters.items() if array.dtype.kind not in "iu"
    }
    found = placed(adapter.source, trained, names, "parameters of the model", "parameter")
    # the first name of a parameter → all of them: a recipe may have any of these
    tied: dict[str, list[str]] = {}
    for each in declared.values():
        tied.setdefault(each.first, []).append(each.name)
    changed = []
    for name, array in found.items():
        aliases = tied[declared[name].first] if name in declared else [name]
        if name in declared and tuple(array.shape) != declared[name].shape:
            sizes = f"{list(array.shape)}, and that of the model {list(declared[name].shape)}"
            raise InputError(f"{adapter.source}: parameter {name!r} has the shape {sizes}")
        values = dict.fromkeys(value for alias in aliases for value in stored.get(alias, ()))
        module = tagged.hierarchy.get(tags.parent_path(name) or "")
        if not sum(_replace(tagged, value, name, array, aliases) for value in values):
            if module is not None and module.fate in (Fate.DEAD, Fate.UNCALLED):
                continue
            if name not in declared or not _add_bias(tagged, name, array):
                raise InputError(
                    f"{adapter.source}: parameter {name!r} has no place of its own in the model"
                )
        changed.append(name)
    return changed


def _add_bias(tagged: TaggedModel, name: str, array: Array) -> bool:
    """Give a bias back to the products of its module; exporters leave one of zeros out. Whether that is possible."""
    path, works = tags.parent_path(name) or "", tagged.index.works
    nodes = [
        node
        for node in tagged[path].nodes
        if operator_of(node) in _BIASED and works[node].doing == (path,)
    ]
    uses = [use for use in products_of(tagged, nodes) if use.place == 1]
    have_one = any(len(node.inputs) > 2 and node.inputs[2] is not None for node in nodes)
    if not uses or len(uses) != len(nodes) or array.ndim != 1 or have_one:
        return False
    graph = uses[0].value.graph
    assert graph is not None
    stored = ir.tensor(array.astype(numbers_of(uses[0].value).dtype.numpy()))
    bias = add_initializer(
        graph, stored, Names(tagged.model).tensors.unused(name), step("computed", name, "lora")
    )
    for use in uses:
        use.node.resize_inputs(3)
        use.node.replace_input_with(2, bias)
    return True


def _replace(
    tagged: TaggedModel, value: ir.Value, name: str, array: Array, aliases: Sequence[str]
) -> bool:
    """Replace one stored tensor, or the copy of it that the parameter's module reads; whether there is one."""
    recipe = recipe_of(value)
    is_equal = isinstance(recipe, list) and recipe[0] == "equal"
    module = tags.parent_path(name) or ""
    if is_equal or len(aliases) > 1:
        if not any(
            tags.is_under(owner, module)
            for node, _ in value.uses()
            for owner in tagged.owners_of(node)
        ):
            return False
        value = _own(tagged, value, module, name)
    if isinstance(recipe, list) and is_equal:
        recipe = next(each for each in operands_of(recipe) if {*aliases} & {*parameters_in(each)})
    others = [each for each in dict.fromkeys(parameters_in(recipe)) if each not in aliases]
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
    made = remade(tensor, recipe, dict.fromkeys(aliases, array))
    value.const_value = recorded(made, step("computed", recipe, "lora"))
    return True


def require_peft(adapter: Adapter) -> None:
    """Refuse (`InputError`) an adapter of which PEFT computes the weights, if PEFT is not installed."""
    needing = [path for path, layer in adapter.layers.items() if not layer.is_plain]
    if needing and find_spec("peft") is None:
        raise InputError(
            f"{adapter.source}: module {needing[0]!r} has more than two factors of a linear layer, which needs PEFT; "
            'install it with: pip install "htp-export[lora]"'
        )


def merged(weight: Array, layer: LowRank, scaling: float) -> Array:
    """A weight of floats as PEFT's ``merge_and_unload`` leaves it; ``scaling`` is of the product of the factors.

    ``weight`` is as PyTorch has it: (outputs, inputs), (outputs, inputs, size of the kernel, ...)
    or (rows, size).

    Examples:
        >>> merged(np.eye(2, dtype=np.float32), LowRank(np.ones((1, 2)), np.ones((2, 1))), 0.5).tolist()
        [[1.5, 0.5], [0.5, 1.5]]
    """
    if not layer.is_plain:
        return _by_peft(weight, layer, scaling)
    total: Array = weight + layer.b.astype(np.float32) @ layer.a.astype(np.float32) * np.float32(
        scaling
    )
    return total


def _by_peft(weight: Array, layer: LowRank, scaling: float) -> Array:
    """The same through a layer of PEFT, whose base is a layer of PyTorch with the weight."""
    import torch

    # PEFT draws factors before it gets these
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
        around: Any = holder["layer"]  # type: ignore[index]
        dot = "lora_embedding_{}" if layer.kind == "embedding" else "lora_{}.weight"
        tensors = {"A": layer.a, "B": layer.b}
        state = {f"layer.{dot.format(name)}": _tensor(array) for name, array in tensors.items()}
        if layer.magnitude is not None:
            shape = (1, -1, *(1 for _ in weight.shape[2:])) if weight.ndim > 2 else (-1,)
            state["layer.lora_magnitude_vector"] = _tensor(layer.magnitude.reshape(shape))
        left: Any = peft.set_peft_model_state_dict(holder, state)
        assert not left.unexpected_keys, left
        around.merge()
        made: Array = around.get_base_layer().weight.detach().numpy()
    return made


def _base(weight: Array, kind: str) -> Any:
    """A layer of PyTorch with a weight; its other settings do not matter for that."""
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
