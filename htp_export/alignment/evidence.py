"""Evidence of which tensors of two models are the same: contents of weights, and values when both models run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.alignment.alignment import AlignmentEvidence
from htp_export.alignment.graph_summary import NOTHING, GraphSummary
from htp_export.alignment.stored_weights import WeightNumbers, weight_numbers
from htp_export.alignment.unnamed_alignment import input_pairs
from htp_export.alignment.weight_similarity import (
    Likeness,
    Originals,
    is_distinctive,
    largest_error,
    relative_error,
    turned,
)
from htp_export.errors import FileError, InputError
from htp_export.model.hashes import array_hash
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.carried_inputs import feed_original, feed_other, simpler_feeds
from htp_export.runtime.inputs import infer_bound
from htp_export.runtime.runner import Runner, portions
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import base_op

Model: TypeAlias = tuple[ir.Model, GraphSummary]
_Use: TypeAlias = tuple[Likeness, Callable[[], Array]]

_ROUNDED = 1e-6
"""Relative error of a weight beyond which the original runs with the weight of the other file."""

# what these operators give has no values to compare
_NO_TENSORS = ("Sequence", "SplitToSequence", "Optional")


def weights_then_values(
    before: Model, after: Model, data: Mapping[str, Any] | None, seed: int = 0
) -> Iterator[tuple[AlignmentEvidence, str]]:
    """What is known of tensors by weights, and then by values too, or why these were not compared.

    Raises:
        InputError: If ``data`` (input name of the original → array) are given, and are not those of
            the original.
    """
    feed, problems = dict[str, Array](), list[str]()
    try:
        feed = feed_original(before[0], data, seed)
    except InputError as error:
        if data is not None:
            raise
        problems.append(str(error))
    evidence = AlignmentEvidence(inputs=input_pairs(before[1], after[1]))
    evidence.weights, found = _weights(before, after)
    yield evidence, ""
    originals = dict.fromkeys((_with_weights_of(before, found), before[0])) if not problems else ()
    other = _exact(after[0])
    for original, tried in itertools.product(originals, simpler_feeds(before[0], feed)):
        try:
            feeds = tried, feed_other(other, tried)
            names = "the original model", "the other model"
            compared = _compared((original, before[1]), (other, after[1]), feeds, names)
        except (FileError, InputError) as error:
            problems.append(str(error))
        else:
            yield replace(compared, inputs=evidence.inputs, weights=evidence.weights), ""
            return
    yield evidence, problems[0]


# --- weights ---


def renamed_weights(before: Model, after: Model) -> dict[int, Likeness]:
    """Weight after a tool → original weight with the same contents, where neither model has one of the other's name.

    Read are only large weights, and only where both models have unknown ones of the same type and
    shape.
    """
    originals, results = _unnamed(before, after), _unnamed(after, before)
    found: dict[int, Likeness] = {}
    for kind in originals.keys() & results.keys():
        by_content = {_content(before, index): index for index in reversed(originals[kind])}
        for index in results[kind]:
            content = _content(after, index)
            if content is not None and content in by_content:
                found[index] = Likeness((by_content[content],))
    return found


def _unnamed(own: Model, other: Model) -> dict[object, list[int]]:
    """Type and shape → the large weights of the main graph that the other model does not have by name."""
    (model, summary), (_, others) = own, other
    found = defaultdict[object, list[int]](list)
    for index, value in enumerate(summary.values):
        is_large = value.kind == "initializer" and not value.content and not value.scope
        if is_large and value.name not in others.by_name and value.name in model.graph.initializers:
            found[value.dtype, value.shape].append(index)
    return found


def _content(own: Model, index: int) -> bytes | None:
    """The hash of a weight's numbers; None if its data file is gone."""
    model, summary = own
    tensor = model.graph.initializers[summary.values[index].name].const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    try:
        return array_hash(np.asarray(tensor.numpy()))
    except (FileError, OSError):
        return None


def _weights(
    before: Model, after: Model
) -> tuple[dict[int, Likeness], list[tuple[WeightNumbers, Likeness]]]:
    """The weights of another file that are recognised, by tensor and as they are stored."""
    known, stored = Originals(weights=True), dict[int, Sequence[int]]()
    for weight in weight_numbers(before[0].graph):
        places = _places(before[1], weight)
        if NOTHING not in places:
            # an original is known by the last of its values: its numbers, not its levels
            stored[places[-1]] = places
            with contextlib.suppress(FileError, OSError):  # its data file is gone
                known.add(places[-1], weight.load(), weight.load)
    found, weights = list[tuple[WeightNumbers, Likeness]](), dict[int, Likeness]()
    for weight in weight_numbers(after[0].graph):
        like = None
        with contextlib.suppress(FileError, OSError):
            like = known.find(weight.load())
        if like is None:
            continue
        found.append((weight, like))
        places = _places(after[1], weight)
        # levels are matched with levels, numbers with numbers
        for place, index in enumerate(places):
            alike = [
                stored[k][place] if len(stored[k]) == len(places) else k for k in like.originals
            ]
            weights[index] = replace(like, originals=tuple(alike))
    weights.pop(NOTHING, None)
    return weights, found


def _places(summary: GraphSummary, weight: WeightNumbers) -> list[int]:
    return [summary.find(str(value.name)) for value in weight.values]


def _with_weights_of(before: Model, found: Iterable[tuple[WeightNumbers, Likeness]]) -> ir.Model:
    """The original with the rounded weights of the other file: both then compute the same but for activations."""
    uses: defaultdict[int, list[_Use]] = defaultdict(list)
    for weight, like in found:
        for original in like.originals if like.error > _ROUNDED else ():
            uses[original].append((like, weight.load))
    if not uses:
        return before[0]
    plain = {
        before[1].find(str(each.values[0].name)): each
        for each in weight_numbers(before[0].graph)
        if each.plain
    }
    model = before[0].clone()
    for original, entries in uses.items():
        changed = (
            rounded_weight(plain[original].load(), original, entries) if original in plain else None
        )
        if changed is not None:
            value = model.graph.initializers[before[1].values[original].name]
            assert value.dtype is not None
            value.const_value = ir.Tensor(
                changed.astype(value.dtype.numpy()), dtype=value.dtype, name=value.name
            )
    return model


def rounded_weight(original: Array, index: int, uses: Iterable[_Use]) -> Array | None:
    """An original weight with the numbers that the other file has in its place; None if it has not all of them."""
    filled: dict[bool, Array] = {}
    for like, load in uses:
        array = load()
        if not like.parts:
            numbers = (array.astype(np.float32) - like.offset) / like.scale
            layouts = (
                [numbers.reshape(original.shape)]
                if array.shape != original.shape[::-1] or like.same_shape
                else []
            )
            layouts += [numbers.T] if numbers.T.shape == original.shape else []
            return min(layouts, key=lambda layout: relative_error(layout, original))
        for part in (part for part in like.parts if part.original == index):
            numbers = filled.setdefault(
                part.turned, np.full(turned(original, part.turned).shape, np.nan, np.float32)
            )
            before = (slice(None),) * part.axis
            numbers[(*before, slice(*part.of))] = array[(*before, slice(*part.place))]
    return next(
        (turned(numbers, way) for way, numbers in filled.items() if not np.isnan(numbers).any()),
        None,
    )


# --- values ---


def _compared(
    before: Model,
    after: Model,
    feeds: tuple[Mapping[str, Array], Mapping[str, Array]],
    names: tuple[str, str],
) -> AlignmentEvidence:
    """Run both models, and find the tensors of one among those of the other, within the error of the outputs."""
    evidence, summary = AlignmentEvidence(), before[1]
    with ArrayStore.opened(PORTION_BYTES) as store:
        known, compared = Originals(), set[int]()
        results, idle = list[Array](), dict[int, int]()
        for index, array in _tensors_of_run(*before, feeds[0], names[0]):
            held = store.keep(array)
            same = known.add(index, array, functools.partial(getattr, held, "array"))
            maker = summary.maker[index]
            given_back = [v for v in same if maker != NOTHING and v in summary.nodes[maker].inputs]
            idle |= {maker: given_back[0]} if given_back else {}
            compared.add(index)
            results += [array] if index in summary.outputs else []
        outputs = [str(value.name) for value in after[0].graph.outputs]
        theirs = Runner(after[0], names[1], SessionSettings()).run(feeds[1], outputs)
        known.tolerance = largest_error([(array, results) for array in theirs.values()], known.find)
        if math.isinf(known.tolerance):
            raise InputError("its outputs have the numbers of no tensor of the original model")
        values, unequal = dict[int, Likeness](), set[int]()
        for index, array in _tensors_of_run(*after, feeds[1], names[1]):
            like = known.find(array)
            if like is not None:
                values[index] = like
            elif is_distinctive(array):
                unequal.add(index)
    evidence.values, evidence.unequal, evidence.compared, evidence.idle = (
        values,
        unequal,
        compared,
        idle,
    )
    return evidence


def _tensors_of_run(
    model: ir.Model, summary: GraphSummary, feed: Mapping[str, Array], name: str
) -> Iterator[tuple[int, Array]]:
    """Run a model, and yield the tensors that depend on its inputs with their places in its summary, each once."""
    sizes: dict[str, int | None] = {}
    known = infer_bound(model, {name: array.shape for name, array in feed.items()})
    bytes_of = {value.name: known.bytes_of(value) for node in model.graph for value in node.outputs}
    for index, value in enumerate(summary.values):
        if value.scope or not value.name or not summary.live[index]:
            continue
        if value.kind == "input":
            yield index, feed[value.name]
        elif value.kind == "node" and not base_op(
            summary.nodes[summary.maker[index]].op
        ).startswith(_NO_TENSORS):
            sizes[value.name] = bytes_of.get(value.name)
    largest = max((size for size in sizes.values() if size is not None), default=0)
    runner = Runner(model, name, SessionSettings())
    expected = {tensor: largest if size is None else size for tensor, size in sizes.items()}
    for wanted in portions(expected, PORTION_BYTES):
        arrays = runner.run(feed, wanted)
        for tensor in wanted:
            yield summary.find(tensor), arrays.pop(tensor)


def _exact(model: ir.Model) -> ir.Model:
    """The model without permission for its operators to compute less exactly than their inputs are."""
    copy = model.clone()
    for node in copy.graph.all_nodes():
        node.attributes.pop("accuracy_level", None)
    return copy
