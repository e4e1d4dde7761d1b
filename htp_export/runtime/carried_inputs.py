"""The same example inputs for two files of one model, whose inputs have other names, or are not the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format.leaves import tensors_in
from htp_export.runtime.arrays import Array
from htp_export.runtime.declared_inputs import Input, check_elements
from htp_export.runtime.inputs import Inputs

_SIZES = (2, 5, 3)  # of open dimensions, one after another


def inputs_of_call(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The tensors of a call of a PyTorch model by the names of the inputs of its file: by keyword, otherwise in order.

    Raises:
        InputError: If there are not as many tensors as names.
    """
    tensors = list(tensors_in((tuple(args), dict(kwargs))))
    by_keyword = {
        name: value for name, value in kwargs.items() if any(value is tensor for tensor in tensors)
    }
    if set(names) == set(by_keyword):
        return by_keyword
    if len(names) != len(tensors):
        raise InputError(
            f"the model has {len(tensors)} tensors as inputs, and its file {len(names)}: {', '.join(names)}"
        )
    return dict(zip(names, tensors, strict=True))


def words(name: str) -> frozenset[str]:
    """The words and numbers in a name, words without the plural."""
    return frozenset(_split(name))


def _split(name: str) -> list[str]:
    found = re.findall(r"\d+|[A-Za-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name))
    return [word.lower().rstrip("s") if not word.isdigit() else word for word in found]


def pair_names(ours: Mapping[str, int | None], theirs: Mapping[str, int | None]) -> dict[str, str]:
    """Pair names of two files: equal ones first, then those with the most words in common, then what is left in order.

    Each name has the rank of its tensor, None if it is unknown.

    Examples:
        >>> pair_names({"past_key_values.0.key": 4}, {"cache.layers.0.keys": 4, "cache.layers.0.values": 4})
        {'past_key_values.0.key': 'cache.layers.0.keys'}
        >>> sorted(pair_names({"input.1": 2, "mask.3": 2}, {"input_ids": 2, "attention_mask": 2}).items())
        [('input.1', 'input_ids'), ('mask.3', 'attention_mask')]
    """
    pairs = {name: name for name in ours if name in theirs}
    likeness = {
        (mine, other): _likeness(mine, other)
        for mine in ours
        for other in theirs
        if mine not in pairs and other not in pairs
        if _fit(ours[mine], theirs[other])
        and (_numbers(mine) == _numbers(other) or not _numbers(other))
    }

    def is_open(pair: tuple[str, str]) -> bool:
        return pair[0] not in pairs and pair[1] not in pairs.values()

    for (mine, other), likely in sorted(likeness.items(), key=lambda entry: -entry[1]):
        shared = (
            pair
            for pair, rival in likeness.items()
            if rival == likely and (pair[0] == mine) != (pair[1] == other)
        )
        if likely and is_open((mine, other)) and not any(map(is_open, shared)):
            pairs[mine] = other
    left, free = [m for m in ours if m not in pairs], [t for t in theirs if t not in pairs.values()]
    if len(left) == len(free) and all(
        _fit(ours[m], theirs[t]) for m, t in zip(left, free, strict=True)
    ):
        pairs.update(zip(left, free, strict=True))
    return pairs


def _likeness(name: str, other: str) -> float:
    """The share of words that two names have in common; the last word counts most: it tells keys from values."""
    mine, theirs = words(name), words(other)
    last, others_last = (
        next((word for word in reversed(_split(each)) if not word.isdigit()), "")
        for each in (name, other)
    )
    return len(mine & theirs) / len(mine | theirs) + (last == others_last)


def _fit(rank: int | None, other: int | None) -> bool:
    return rank is None or other is None or rank == other


def _numbers(name: str) -> frozenset[str]:
    return frozenset(word for word in words(name) if word.isdigit())


def feed_original(
    model: ir.Model, given: Mapping[str, Any] | None, seed: int = 0
) -> dict[str, Array]:
    """Inputs of the original model: those that are given, under its names, or random ones."""
    inputs = Inputs.of(model)
    if given is not None:
        return dict(inputs.feed(given).arrays)
    return dict(inputs.random(open_sizes=_SIZES, seed=seed).arrays)


def feed_other(model: ir.Model, original: Mapping[str, Array]) -> dict[str, Array]:
    """The same inputs for the other model; in the rest positions are counted, masks hide nothing, and caches are empty.

    Raises:
        InputError: If its inputs cannot be made of these.
    """
    inputs = Inputs.of(model)
    ranks = {
        declared.name: None if declared.shape is None else len(declared.shape)
        for declared in inputs
    }
    pairs = pair_names(ranks, {name: array.ndim for name, array in original.items()})
    feed = {}
    for declared in inputs:
        if declared.name in pairs:
            feed[declared.name] = _in_type(original[pairs[declared.name]], declared)
    shapes = {name: array.shape for name, array in feed.items()}
    sizes = dict(inputs.bind(shapes=shapes).sizes)
    length = next(
        (array.shape[1] for array in feed.values() if array.dtype.kind in "iu" and array.ndim == 2),
        1,
    )
    for declared in inputs:
        if declared.name not in feed:
            feed[declared.name] = _made_up(declared, sizes, length)
    return dict(inputs.feed(feed).arrays)


def simpler_feeds(model: ir.Model, feed: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
    """The inputs, their first example, and both with an empty cache: some fused operators take no others."""
    for arrays in (feed, _with_empty_cache(model, feed)):
        if arrays:
            yield arrays
            sizes = {array.shape[0] for array in arrays.values() if array.ndim}
            if len(sizes) == 1 and sizes != {1}:
                yield {name: array[:1] if array.ndim else array for name, array in arrays.items()}


def _with_empty_cache(model: ir.Model, feed: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs without what is past: a size that only floats have, and that is a part of another input's size."""
    shapes = {declared.name: declared.shape or () for declared in Inputs.of(model)}
    sums = {
        str(size): set(str(size).split(" + "))
        for shape in shapes.values()
        for size in shape
        if " + " in str(size)
    }
    floats = {
        size for name, shape in shapes.items() if feed[name].dtype.kind == "f" for size in shape
    }
    others = {
        size for name, shape in shapes.items() if feed[name].dtype.kind != "f" for size in shape
    }
    past = {
        part for parts in sums.values() for part in parts if part in floats and part not in others
    }
    if not past:
        return {}
    lengths = {
        str(size): feed[n].shape[k] for n, shape in shapes.items() for k, size in enumerate(shape)
    }
    empty = {}
    for name, shape in shapes.items():
        array = feed[name]
        for axis, size in enumerate(map(str, shape)):
            gone = (
                lengths[size]
                if size in past
                else sum(lengths.get(p, 0) for p in sums.get(size, set()) & past)
            )
            array = array[(slice(None),) * axis + (slice(gone, None),)] if gone else array
        empty[name] = array
    return empty


def _in_type(array: Array, declared: Input) -> Array:
    if declared.type is None:
        return array
    wanted = declared.type.numpy()
    same_kind = declared.type.is_floating_point() == (array.dtype.kind == "f")
    return array.astype(wanted) if array.dtype != wanted and same_kind else array


def _made_up(declared: Input, sizes: Mapping[str, int], length: int) -> Array:
    """An input that the original model does not have."""
    if declared.type is None or declared.shape is None:
        raise InputError(
            f"input {declared.name!r} ({declared}) is none of the original model; give it"
        )
    is_float = declared.type.is_floating_point()
    open_size = 0 if is_float else length
    shape = [
        size if isinstance(size, int) else sizes.get(str(size), open_size)
        for size in declared.shape
    ]
    check_elements(declared.name, shape)
    if is_float or not shape:
        return np.zeros(shape, declared.type.numpy())
    if "mask" in words(declared.name):
        return np.ones(shape, declared.type.numpy())
    return np.broadcast_to(np.arange(shape[-1]), shape).astype(declared.type.numpy())
