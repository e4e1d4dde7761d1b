"""Gathers the evidence for `adopt`: pairs inputs, recognises weights, runs both models and compares their tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.carry.adoption.feeds import feed_original, feed_other, pair_names, simpler_feeds
from htp_export.capabilities.carry.adoption.foreign_alignment import AlignmentEvidence
from htp_export.capabilities.carry.adoption.likenesses import (
    Likeness,
    Originals,
    is_distinctive,
    largest_error,
    relative_error,
    turned,
)
from htp_export.capabilities.carry.adoption.stored_numbers import StoredWeight, stored_weights
from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary
from htp_export.capabilities.carry.values import tensors_of_run
from htp_export.errors import InputError
from htp_export.model.content_hash import array_hash
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings

__all__ = ["gather", "rounded_weight"]

Model: TypeAlias = tuple[ir.Model, GraphSummary]
_Use: TypeAlias = tuple[Likeness, Callable[[], Array]]

_ROUNDED = 1e-6
"""Relative error of a weight beyond which the original runs with the weight of the other file."""


def gather(
    before: Model, after: Model, inputs: Mapping[str, Any] | None, seed: int = 0
) -> tuple[AlignmentEvidence, str]:
    """What is known of the tensors of the other file, and why values were not compared, if they were not.

    Args:
        before: The original model and its summary.
        after: The other model and its summary, with names.
        inputs: Input name of the original → array; None for random ones.
        seed: Of random inputs.

    Raises:
        InputError: If ``inputs`` are given, and are not those of the original.
    """
    evidence, problems = AlignmentEvidence(inputs=_inputs(before, after)), list[str]()
    found = _weights(before, after, evidence)
    try:
        feed = feed_original(before[0], inputs, seed)
    except InputError as error:
        if inputs is not None:
            raise
        return evidence, str(error)
    originals = [_with_weights_of(before, found)]
    originals += [before[0]] if originals[0] is not before[0] else []
    for original, tried in itertools.product(originals, simpler_feeds(before[0], feed)):
        try:
            _compare(original, before[1], after, tried, evidence)
        except InputError as error:
            problems.append(str(error))
        else:
            return evidence, ""
    return evidence, problems[0]


def _inputs(before: Model, after: Model) -> dict[int, int]:
    ours, theirs = (_ranks(summary) for _, summary in (after, before))
    pairs = {after[1].find(mine): before[1].find(other) for mine, other in pair_names(ours, theirs).items()}
    return {mine: other for mine, other in pairs.items() if NOTHING not in (mine, other)}


def _ranks(summary: GraphSummary) -> dict[str, int | None]:
    values = [summary.values[index] for index in summary.inputs if summary.values[index].kind == "input"]
    return {value.name: None if value.shape is None else len(value.shape) for value in values}


# --- weights ---


def _weights(before: Model, after: Model, evidence: AlignmentEvidence) -> list[tuple[StoredWeight, Likeness]]:
    """Recognise the weights of the other file, and return them with the originals, by the last of their values."""
    known, stored = Originals(weights=True), dict[int, Sequence[int]]()
    for weight in stored_weights(before[0].graph):
        places = _places(before[1], weight)
        if NOTHING not in places:
            stored[places[-1]] = places
            known.add(places[-1], weight.load(), weight.load)
    found, weights = list[tuple[StoredWeight, Likeness]](), dict[int, Likeness]()
    for weight in stored_weights(after[0].graph):
        like = known.find(weight.load())
        if like is None:
            continue
        found.append((weight, like))
        places = _places(after[1], weight)
        for place, index in enumerate(places):  # levels are matched with levels, numbers with numbers
            alike = [stored[k][place] if len(stored[k]) == len(places) else k for k in like.originals]
            weights[index] = replace(like, originals=tuple(alike))
    weights.pop(NOTHING, None)
    evidence.weights = weights
    return found


def _places(summary: GraphSummary, weight: StoredWeight) -> list[int]:
    return [summary.find(str(value.name)) for value in weight.values]


def _with_weights_of(before: Model, found: Iterable[tuple[StoredWeight, Likeness]]) -> ir.Model:
    """The original model with the weights of the other file, as far as those are rounded.

    Both then compute the same but for the rounding of activations.
    """
    uses: defaultdict[int, list[_Use]] = defaultdict(list)
    for weight, like in found:
        for original in like.originals if like.error > _ROUNDED else ():
            uses[original].append((like, weight.load))
    plain = {before[1].find(str(each.values[0].name)): each for each in stored_weights(before[0].graph) if each.plain}
    model = before[0].clone() if uses else before[0]
    for original, entries in uses.items():
        changed = rounded_weight(plain[original].load(), original, entries) if original in plain else None
        if changed is not None:
            value = model.graph.initializers[before[1].values[original].name]
            assert value.dtype is not None
            value.const_value = ir.Tensor(changed.astype(value.dtype.numpy()), dtype=value.dtype, name=value.name)
    return model


def rounded_weight(original: Array, index: int, uses: Iterable[_Use]) -> Array | None:
    """An original weight with the numbers that the other file has in its place; None if it has not all of them."""
    filled: dict[bool, Array] = {}
    for like, load in uses:
        array = load()
        if not like.parts:
            numbers = (array.astype(np.float32) - like.offset) / like.scale
            layouts = (
                [numbers.reshape(original.shape)] if array.shape != original.shape[::-1] or like.same_shape else []
            )
            layouts += [numbers.T] if numbers.T.shape == original.shape else []
            return min(layouts, key=lambda layout: relative_error(layout, original))
        for part in (part for part in like.parts if part.original == index):
            numbers = filled.setdefault(part.turned, np.full(turned(original, part.turned).shape, np.nan, np.float32))
            before = (slice(None),) * part.axis
            numbers[(*before, slice(*part.of))] = array[(*before, slice(*part.place))]
    return next((turned(numbers, way) for way, numbers in filled.items() if not np.isnan(numbers).any()), None)


# --- values ---


def _compare(
    original: ir.Model, before: GraphSummary, after: Model, feed: Mapping[str, Array], to: AlignmentEvidence
) -> None:
    """Run both models, and find the tensors of one among those of the other."""
    model = _exact(after[0])
    others = feed_other(model, feed)
    with ArrayStore.opened(PORTION_BYTES) as store:
        known, compared, results, repeated = Originals(), set[int](), list[Array](), dict[int, int]()
        for index, array in tensors_of_run(original, before, feed, "the original model", PORTION_BYTES):
            held = store.keep(array)
            repeated |= _repeats(before, index, known.add(index, array, functools.partial(getattr, held, "array")))
            compared.add(index)
            results += [array] if index in before.outputs else []
        outputs = [str(value.name) for value in model.graph.outputs]
        theirs = Runner(model, "the other model", SessionSettings()).run(others, outputs)
        known.tolerance = largest_error([(array, results) for array in theirs.values()], known.find)
        if math.isinf(known.tolerance):
            raise InputError("its outputs have the numbers of no tensor of the original model")
        values, unequal, seen = dict[int, Likeness](), set[int](), defaultdict[Any, list[int]](list)
        repeats = dict[int, int]()
        for index, array in tensors_of_run(model, after[1], others, "the other model", PORTION_BYTES):
            like = known.find(array)
            if like is not None:
                values[index] = like
            if is_distinctive(array):
                unequal |= {index} if like is None else set()
                same = seen[array.shape, array.dtype, array_hash(array)]
                repeats |= _repeats(after[1], index, same)
                same.append(index)
    to.values, to.unequal, to.compared = values, unequal, compared
    to.idle, to.idle_after = repeated, repeats


def _repeats(summary: GraphSummary, value: int, same: Iterable[int]) -> dict[int, int]:
    """The producer of a tensor, and which input it gives back, if it does so."""
    maker = summary.maker[value]
    inputs = [] if maker == NOTHING else [v for v in same if v in summary.nodes[maker].inputs]
    return {maker: inputs[0]} if inputs else {}


def _exact(model: ir.Model) -> ir.Model:
    """The model without permission for its operators to compute less exactly than their inputs are."""
    copy = model.clone()
    for node in copy.graph.all_nodes():
        node.attributes.pop("accuracy_level", None)
    return copy
