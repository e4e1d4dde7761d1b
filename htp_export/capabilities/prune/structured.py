"""Channels and attention heads: the choice of the least important, and their removal everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.coupled_axes import Axis
from htp_export.capabilities.prune.coupling import Coupling, StopError, couple
from htp_export.capabilities.prune.cut_axes import ParameterShape, change_parameters, cut_axes
from htp_export.capabilities.prune.masks import Scores
from htp_export.capabilities.prune.sparsities import Sparsity
from htp_export.editing.edit import Edit
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.parameter_places import ParameterPlaces, WeightSources
from htp_export.weights.products import Weight
from htp_export.weights.storing import numbers_of


@dataclass(frozen=True)
class Cut:
    """The result of cutting channels out of a model.

    Attributes:
        shapes: Weight → its shape before and after, for all initializers that became smaller.
        short: Weight → the channels that stay, if the share cannot be reached.
        whole: Weight → why none of its channels can be cut.
    """

    shapes: Mapping[str, tuple[ParameterShape, ParameterShape]] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[Weight, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cuttable:
    """Channels of coupled weights to choose from, in groups that can be cut.

    ``weight``: the weight that they were found from.
    ``scores``: label → mean score of the elements that compute its channels.
    ``gone``: the labels that are cut.
    """

    weight: Weight
    value: Sparsity
    coupling: Coupling
    scores: Mapping[int, float]
    gone: set[int] = field(default_factory=set)


def cut_channels(
    tagged: TaggedModel, values: Mapping[Weight, Sparsity], scores: Scores, *, together: bool
) -> Cut:
    """Cut the least important channels and heads out of a model, in place, where it is possible.

    With ``together``, a share applies to all channels with the same value.
    """
    found, whole = _cuttable(tagged, values, scores)
    _refuse_missing_heads(values, found)
    pools: defaultdict[Sparsity | Weight, list[_Cuttable]] = defaultdict(list)
    for cuttable in found:
        pools[cuttable.value if together else cuttable.weight].append(cuttable)
    short: dict[str, str] = {}
    for pool in pools.values():
        problem = _choose(pool)
        if problem:
            short[pool[0].weight.name] = problem
    kept = _kept_indices(found)
    cut_values = {value for value, _ in kept}
    stored: list[ir.Value] = list(tagged.model.graph.initializers.values())
    for node in tagged.nodes:
        if is_standard(node, "Constant"):
            stored += node.outputs
    weights = [value for value in stored if value in cut_values]
    before = {value: _shape(value) for value in weights}
    places = ParameterPlaces(tagged, WeightSources(tagged))
    with Edit(tagged) as edit:
        cut_axes(edit, kept)
        after = {value: _shape(value) for value in weights}
        changes = {value: (before[value], {"": after[value]}) for value in weights}
        change_parameters(edit, places, changes)
    shapes = {str(value.name): (before[value], after[value]) for value in weights}
    return Cut(shapes, short, whole)


def _refuse_missing_heads(values: Mapping[Weight, Sparsity], found: Sequence[_Cuttable]) -> None:
    """Refuse a rule for heads whose weights have no channels of heads."""
    cuttable_values = {cuttable.value for cuttable in found}
    for value in dict.fromkeys(values.values()):
        if value.kind == "heads" and value not in cuttable_values:
            names = ", ".join(repr(weight.name) for weight in values if values[weight] == value)
            raise InputError(
                f"there are no attention heads to cut: no channels of {names} are split into heads"
            )


def _kept_indices(found: Sequence[_Cuttable]) -> dict[Axis, Array]:
    """Axis → whether each index stays, for the axes that lose some."""
    kept: dict[Axis, Array] = {}
    for cuttable in found:
        gone = list(cuttable.gone)
        for axis in cuttable.coupling.labels:
            stays = ~np.isin(cuttable.coupling.roots(axis), gone)
            kept[axis] = kept[axis] & stays if axis in kept else stays
    return {axis: stays for axis, stays in kept.items() if not stays.all()}


def _choose(pool: Sequence[_Cuttable]) -> str:
    """Choose the groups with the smallest scores, so that every axis keeps one.

    Returns a note if more channels stay than the plan requires.
    """
    value, total = pool[0].value, sum(len(cuttable.coupling.roots_of_all) for cuttable in pool)
    wanted = left = round(value.amount * total)
    ordered: list[tuple[float, int, int]] = []
    for position, cuttable in enumerate(pool):
        scores = cuttable.scores
        ordered += [(scores[group], position, group) for group in cuttable.coupling.groups]
    for _, position, group in sorted(ordered):
        if not left:
            break
        cuttable = pool[position]
        axes = [axis for axis in cuttable.coupling.axes if group in axis]
        would_be_empty = any(axis <= cuttable.gone | {group} for axis in axes)
        if not would_be_empty:
            cuttable.gone.add(group)
            left -= 1
    if not left:
        return ""
    stays = total - wanted + left
    return f"{value} leaves {stays} of {total} {value.kind}, as one of each has to stay"


def _shape(value: ir.Value) -> ParameterShape:
    return tuple(numbers_of(value).shape.numpy())


def _cuttable(
    tagged: TaggedModel, values: Mapping[Weight, Sparsity], scores: Scores
) -> tuple[list[_Cuttable], dict[Weight, str]]:
    """The channels of the weights, each once; and why the channels of other weights stay."""
    found: list[_Cuttable] = []
    whole: dict[Weight, str] = {}
    for weight in counted(list(values), "weights"):
        value, seed = values[weight], (weight.value, weight.uses[0].channels)
        known = next((each for each in found if seed in each.coupling.labels), None)
        if known is not None:
            if known.value != value and "heads" not in (known.value.kind, value.kind):
                raise InputError(
                    f"weight {weight.name!r}: {value} for channels "
                    f"for which the plan also has {known.value}"
                )
            continue
        try:
            coupling = coupling_of(tagged, weight, value)
        except StopError as error:
            whole[weight] = str(error)
            continue
        if coupling is not None:
            alike = [other for other in values if values[other] == value]
            group_scores = _group_scores(coupling, alike, weight, scores)
            found.append(_Cuttable(weight, value, coupling, group_scores))
    return found, whole


def coupling_of(tagged: TaggedModel, weight: Weight, value: Sparsity) -> Coupling | None:
    """All axes with the channels of a weight; None if heads are to be cut and it has none.

    Raises:
        StopError: Its channels cannot be cut.
    """
    wants_heads = value.kind == "heads"
    seed = weight.value, weight.uses[0].channels
    try:
        coupling = couple(tagged, seed, heads=wants_heads)
    except StopError:
        # the layer after the heads, such as the output projection
        if wants_heads:
            return None
        raise
    return None if wants_heads and not coupling.is_joined else coupling


def _group_scores(
    coupling: Coupling, weights: Iterable[Weight], seed: Weight, scores: Scores
) -> dict[int, float]:
    """Label of a group that can be cut → mean score of the elements that compute its channels."""
    random = scores.generator(seed.name)
    if random is not None:
        return dict(zip(coupling.groups, random.random(len(coupling.groups)).tolist(), strict=True))
    sums = dict.fromkeys(coupling.groups, 0.0)
    counts = dict.fromkeys(coupling.groups, 0)
    for weight in weights:
        axis = weight.uses[0].channels
        if (weight.value, axis) not in coupling.labels:
            continue
        array = np.abs(np.moveaxis(weight.tensor.numpy(), axis, 0).astype(np.float32))
        for root, channel in zip(coupling.roots((weight.value, axis)).tolist(), array, strict=True):
            if root in sums:
                sums[root] += float(channel.sum(dtype=np.float64))
                counts[root] += channel.size
    return {root: sums[root] / max(counts[root], 1) for root in sums}
