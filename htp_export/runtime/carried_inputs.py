"""The same example inputs for two files of a model with different input names, or different inputs."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format.leaves import tensors_in
from htp_export.runtime.arrays import Array
from htp_export.runtime.declared_inputs import Input, check_elements
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.settings import RunSettings

_SIZES = (2, 5, 3)  # of open dimensions, in turn: distinct, so that swapped dimensions are an error


def inputs_of_call(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tensors of a call of a PyTorch model by the input names of its file.

    They are matched by keyword if the names are the same, and in order otherwise.

    Raises:
        InputError: If the number of tensors differs from the number of names.
    """
    tensors = list(tensors_in((tuple(args), dict(kwargs))))
    ids = {id(tensor) for tensor in tensors}
    by_keyword = {name: value for name, value in kwargs.items() if id(value) in ids}
    if set(names) == set(by_keyword):
        return by_keyword
    if len(names) != len(tensors):
        raise InputError(
            f"the model takes {len(tensors)} tensors, but its file has {len(names)} inputs: {', '.join(names)}"
        )
    return dict(zip(names, tensors, strict=True))


def words(name: str) -> frozenset[str]:
    """Return the words in a name in lower case and without a plural s, and the numbers in it."""
    return frozenset(_split(name))


def _split(name: str) -> list[str]:
    parts = re.findall(r"\d+|[A-Za-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name))
    return [part if part.isdigit() else part.lower().rstrip("s") for part in parts]


def pair_names(ours: Mapping[str, int | None], theirs: Mapping[str, int | None]) -> dict[str, str]:
    """Pair names of two files: equal names, then names with the most common words, then the rest in order.

    ``ours`` and ``theirs``: name → rank of its tensor, None if it is unknown.

    Examples:
        >>> pair_names({"past_key_values.0.key": 4}, {"cache.layers.0.keys": 4, "cache.layers.0.values": 4})
        {'past_key_values.0.key': 'cache.layers.0.keys'}
        >>> sorted(pair_names({"input.1": 2, "mask.3": 2}, {"input_ids": 2, "attention_mask": 2}).items())
        [('input.1', 'input_ids'), ('mask.3', 'attention_mask')]
    """
    pairs = {name: name for name in ours if name in theirs}
    _pair_by_words(pairs, _similarities(ours, theirs, pairs))
    taken = set(pairs.values())
    rest = [name for name in ours if name not in pairs]
    their_rest = [name for name in theirs if name not in taken]
    if len(rest) == len(their_rest):
        in_order = dict(zip(rest, their_rest, strict=True))
        if all(_same_rank(ours[mine], theirs[other]) for mine, other in in_order.items()):
            pairs.update(in_order)
    return pairs


def _pair_by_words(pairs: dict[str, str], scores: Mapping[tuple[str, str], float]) -> None:
    """Add pairs by similarity, the most similar first, without ambiguous ones."""

    def is_open(pair: tuple[str, str]) -> bool:
        return pair[0] not in pairs and pair[1] not in pairs.values()

    for (mine, other), score in sorted(scores.items(), key=lambda entry: -entry[1]):
        if not score or not is_open((mine, other)):
            continue
        # an open pair of one of the two names with the same score: the choice is ambiguous
        rivals = (
            pair
            for pair, rival_score in scores.items()
            if rival_score == score and (pair[0] == mine) != (pair[1] == other)
        )
        if not any(map(is_open, rivals)):
            pairs[mine] = other


def _similarities(
    ours: Mapping[str, int | None], theirs: Mapping[str, int | None], paired: Container[str]
) -> dict[tuple[str, str], float]:
    """Return the similarity of each pair of names that are not paired, and that may be the same input."""
    scores: dict[tuple[str, str], float] = {}
    for mine, rank in ours.items():
        for other, other_rank in theirs.items():
            if mine in paired or other in paired or not _same_rank(rank, other_rank):
                continue
            if _numbers(mine) == _numbers(other) or not _numbers(other):
                scores[mine, other] = _similarity(mine, other)
    return scores


def _similarity(name: str, other: str) -> float:
    """Return the share of common words of two names, plus 1 if their last words agree: these tell keys from values."""
    mine, theirs = words(name), words(other)
    return len(mine & theirs) / len(mine | theirs) + (_last_word(name) == _last_word(other))


def _last_word(name: str) -> str:
    for word in reversed(_split(name)):
        if not word.isdigit():
            return word
    return ""


def _same_rank(rank: int | None, other: int | None) -> bool:
    """Return whether two ranks may be equal; None is unknown."""
    return rank is None or other is None or rank == other


def _numbers(name: str) -> frozenset[str]:
    return frozenset(word for word in words(name) if word.isdigit())


def feed_original(model: ir.Model, settings: RunSettings) -> dict[str, Array]:
    """Return checked inputs of the original model: the data of one run, by its names, or random ones."""
    inputs = Inputs.of(model)
    given: Any = settings.data
    if given is not None:
        return dict(inputs.feed(given).arrays)
    return dict(inputs.random(settings, open_sizes=_SIZES).arrays)


def feed_other(model: ir.Model, original: Mapping[str, Array]) -> dict[str, Array]:
    """Return the same inputs for another file of the model.

    Inputs that the original model does not have are positions from 0, masks of ones, or empty
    caches.

    Raises:
        InputError: If a value of an input is unknown.
    """
    inputs = Inputs.of(model)
    ranks: dict[str, int | None] = {}
    for declared in inputs:
        ranks[declared.name] = None if declared.shape is None else len(declared.shape)
    pairs = pair_names(ranks, {name: array.ndim for name, array in original.items()})
    feed = {}
    for declared in inputs:
        if declared.name in pairs:
            feed[declared.name] = _in_type(original[pairs[declared.name]], declared)
    shapes = {name: array.shape for name, array in feed.items()}
    sizes = dict(inputs.bind(shapes=shapes).sizes)
    token_ids = (a for a in feed.values() if a.dtype.kind in "iu" and a.ndim == 2)
    length = next((array.shape[1] for array in token_ids), 1)
    for declared in inputs:
        if declared.name not in feed:
            feed[declared.name] = _default_value(declared, sizes, length)
    return dict(inputs.feed(feed).arrays)


def simpler_feeds(model: ir.Model, feed: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
    """Iterate over the inputs, their first example, and both with an empty cache.

    Some fused operators do not support the original inputs.
    """
    for arrays in (feed, _with_empty_cache(model, feed)):
        if arrays:
            yield arrays
            sizes = {array.shape[0] for array in arrays.values() if array.ndim}
            if len(sizes) == 1 and sizes != {1}:
                yield {name: array[:1] if array.ndim else array for name, array in arrays.items()}


def _with_empty_cache(model: ir.Model, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs without cached tokens; empty for a model without a cache.

    A dimension of cached tokens occurs only in inputs of floats, and is a summand of another
    dimension: ``past`` in ``past + sequence``.
    """
    shapes = {declared.name: declared.shape or () for declared in Inputs.of(model)}
    summands: dict[str, set[str]] = {}
    of_floats = set[str]()
    of_others = set[str]()
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        array = feed[name]
        for axis, dim in enumerate(shape):
            if not isinstance(dim, str):
                continue
            lengths[dim] = array.shape[axis]
            (of_floats if array.dtype.kind == "f" else of_others).add(dim)
            if " + " in dim:
                summands[dim] = set(dim.split(" + "))
    past = set[str]().union(*summands.values()) & (of_floats - of_others)
    if not past:
        return {}
    shortened: dict[str, Array] = {}
    for name, shape in shapes.items():
        array = feed[name]
        for axis, dim in enumerate(map(str, shape)):
            if dim in past:
                removed = lengths[dim]
            else:
                removed = sum(lengths.get(part, 0) for part in summands.get(dim, set()) & past)
            if removed:
                array = array[(slice(None),) * axis + (slice(removed, None),)]
        shortened[name] = array
    return shortened


def _in_type(array: Array, declared: Input) -> Array:
    """Convert an array to the precision of an input; between floats and other types, nothing is converted."""
    if declared.type is None:
        return array
    dtype = declared.type.numpy()
    same_kind = declared.type.is_floating_point() == (array.dtype.kind == "f")
    return array.astype(dtype) if array.dtype != dtype and same_kind else array


def _default_value(declared: Input, sizes: Mapping[str, int], length: int) -> Array:
    """Return the value of an input that the original model does not have."""
    if declared.type is None or declared.shape is None:
        raise InputError(
            f"input {declared.name!r} ({declared}) is not an input of the original model; give its value"
        )
    is_float = declared.type.is_floating_point()
    open_size = 0 if is_float else length
    shape = [
        dim if isinstance(dim, int) else sizes.get(str(dim), open_size) for dim in declared.shape
    ]
    check_elements(declared.name, shape)
    if is_float or not shape:
        return np.zeros(shape, declared.type.numpy())
    if "mask" in words(declared.name):
        return np.ones(shape, declared.type.numpy())
    return np.broadcast_to(np.arange(shape[-1]), shape).astype(declared.type.numpy())
