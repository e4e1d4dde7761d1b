"""Zeros in the outputs of modules: thresholds that are measured on data, or random masks.

A threshold is written as ``Abs``, ``LessOrEqual`` and ``Where``, which keep NaN; ``Shrink`` would
replace it by 0 and hide a fault. A random mask is a constant, read by ``Where``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.masks import CutoffSearch, Scores, keys_of
from htp_export.capabilities.prune.sparsities import Sparsity
from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_constant
from htp_export.editing.hooks import Hooks
from htp_export.errors import InputError, RuleError
from htp_export.format.call_tree import Instance
from htp_export.model.module_tensors import OUT, ModuleTensor
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import many
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.data import Data
from htp_export.runtime.runner import Runner
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import DEFAULTS, RunSettings

_FIRST_OPSET = 12
"""The opset of LessOrEqual."""

_Outputs: TypeAlias = Mapping[str, Sequence[ModuleTensor]]
"""Module path → its output in each call."""

_Pool: TypeAlias = tuple[str, ...]
"""Modules whose elements are compared with each other."""


@dataclass
class ZeroCount:
    """Elements of a module's output in all runs of the data, and zeros among them."""

    elements: int = 0
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class MaskedActivations:
    """The zeros that were written into outputs of modules.

    Attributes:
        plan: Module path → its value in the plan, for each module that a rule names.
        counts: Module path → its elements and zeros, for modules whose share was measured.
        thresholds: Module path → the largest absolute value that becomes zero.
        unmasked: Module path → why its output is unchanged.
    """

    plan: Mapping[str, Sparsity] = field(default_factory=dict)
    counts: Mapping[str, ZeroCount] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    unmasked: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivationRules:
    """The rules of a plan for outputs of modules.

    Attributes:
        rules: Selector → share, in order; of several rules for a module, the last one decides.
        data: The inputs on which thresholds and zeros are measured.
        scores: The order in which elements become zero.
        together: Whether modules with the same value are compared with each other.
        strict: Whether an output that stays is an error.
    """

    rules: Mapping[str, Sparsity]
    data: Data | None
    scores: Scores
    together: bool
    strict: bool

    def check(self) -> None:
        """Raise an `InputError` for rules without data, and for data without rules."""
        if self.rules and self.data is None:
            selector, value = next(iter(self.rules.items()))
            problem = f"{value} is measured on data: give data (--data), the inputs of some runs"
            raise RuleError(selector, problem)
        if self.data is not None and not self.rules:
            raise InputError("data are for rules of activations, such as 'activations:0.5'")

    def apply(self, tagged: TaggedModel) -> MaskedActivations:
        """Write zeros into the outputs of modules, in place."""
        if not self.rules:
            return MaskedActivations()
        tagged.require_exact_tags()
        deciding = self._deciding(tagged)
        plan = {path: self.rules[selector] for path, selector in deciding.items()}
        shares = {path: value.amount for path, value in plan.items() if value.amount}
        outputs, unmasked = _outputs_of(tagged, shares)
        self._refuse(deciding, unmasked)
        samples = Samples.of(RunSettings(self.data), tagged.model, passes=2)
        measured = _Measured(tagged, samples, outputs)
        pools = self._pools(plan, outputs)
        if self.scores.seed is None:
            masks = measured.thresholds(pools, shares)
        else:
            measured.count_zeros()
            masks = measured.random_masks(pools, shares, self.scores)
        unmasked = {**unmasked, **masks.problems}
        self._refuse(deciding, unmasked)
        with Edit(tagged) as edit:
            writer = _Writer(edit)
            # A module inside another one may have the same output, and acts first, as in PyTorch.
            for path in reversed([path for path in tagged if path in outputs]):
                for tensor in outputs[path]:
                    writer.write(tensor, masks)
        changed = tagged.refresh()
        after = _Measured(changed, samples, {path: _own_outputs(changed, path) for path in outputs})
        after.count_zeros()
        counts: dict[str, ZeroCount] = {}
        for path, count in measured.counts.items():
            counts[path] = replace(count, after=after.counts[path].before)
        return MaskedActivations(plan, counts, masks.thresholds, unmasked)

    def _deciding(self, tagged: TaggedModel) -> dict[str, str]:
        """Module path → the selector of its rule, in the order of the model; modules that never ran have none."""
        deciding: dict[str, str] = {}
        for selector in self.rules:
            named = [path for path in tagged.select(selector) if path in tagged.hierarchy.called]
            if not named:
                raise RuleError(
                    selector, "the modules that it names never ran: they have no output"
                )
            deciding |= dict.fromkeys(named, selector)
        return {path: deciding[path] for path in tagged if path in deciding}

    def _pools(self, plan: Mapping[str, Sparsity], outputs: _Outputs) -> list[_Pool]:
        """The modules that are compared with each other."""
        if not self.together:
            return [(path,) for path in outputs]
        same: defaultdict[Sparsity, list[str]] = defaultdict(list)
        for path in outputs:
            same[plan[path]].append(path)
        return [tuple(paths) for paths in same.values()]

    def _refuse(self, deciding: Mapping[str, str], unmasked: Mapping[str, str]) -> None:
        """Refuse a rule that changes none of its modules; with ``strict``, one that leaves any unchanged."""
        for selector in self.rules:
            paths = [path for path, own in deciding.items() if own == selector]
            left = [path for path in paths if path in unmasked]
            if left and (self.strict or len(left) == len(paths)):
                problem = f"module {left[0] or '(root)'!r}: {unmasked[left[0]]}"
                raise RuleError(selector, f"{problem}; the value activations:0 leaves it as it is")


@dataclass(frozen=True)
class _Masks:
    """The elements that become zero: up to a threshold by absolute value, or by a constant mask.

    Attributes:
        thresholds: Module path → threshold.
        random: Place of an output → its mask, True for zero.
        problems: Module path → why its share is no element.
    """

    thresholds: dict[str, float] = field(default_factory=dict)
    random: dict[str, Array] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def _outputs_of(
    tagged: TaggedModel, paths: Iterable[str]
) -> tuple[dict[str, list[ModuleTensor]], dict[str, str]]:
    """The outputs of modules in each call; and for the modules without one, the reason."""
    outputs: dict[str, list[ModuleTensor]] = {}
    problems: dict[str, str] = {}
    hooks = Hooks(Edit(tagged), "masked")
    for path in paths:
        tensors = _own_outputs(tagged, path)
        try:
            _check_outputs(tagged, hooks, tensors)
        except InputError as error:
            problems[path] = str(error)
            continue
        outputs[path] = tensors
    return outputs, problems


def _own_outputs(tagged: TaggedModel, path: str) -> list[ModuleTensor]:
    return [tensor for tensor in tagged.tensors(path) if tensor.side == OUT]


def _check_outputs(tagged: TaggedModel, hooks: Hooks, tensors: Sequence[ModuleTensor]) -> None:
    """Raise an `InputError` for outputs that are not one tensor of floating point in each call."""
    if not tensors:
        raise InputError("the file knows no output of it")
    several = [tensor.place for tensor in tensors if not tensor.first]
    if several:
        raise InputError(
            f"it returns several tensors, also {', '.join(several[:3])}; "
            "name a module that returns one, in it or around it"
        )
    for tensor in tensors:
        if tensor.problem:
            raise InputError(f"{tensor.place}: {tensor.problem}")
        value, _ = hooks.place(tensor)
        dtype = tagged.inferred.described(value).dtype
        if dtype is None or not dtype.is_floating_point():
            kind = "of unknown type" if dtype is None else dtype.name
            raise InputError(f"{tensor.place}: tensor {value.name!r} is {kind}, and no float")
    opset = tagged.model.graph.opset_imports.get("", 1)
    if opset < _FIRST_OPSET:
        raise InputError(
            f"LessOrEqual is an operator of opset {_FIRST_OPSET}, and the model has {opset}: "
            f"export it with opset_version={_FIRST_OPSET}, or later"
        )


class _Measured:
    """Outputs of modules on data, of which one run is in memory at a time."""

    def __init__(self, tagged: TaggedModel, samples: Samples, outputs: _Outputs) -> None:
        self._tagged, self._samples, self._outputs = tagged, samples, outputs
        self._shapes: dict[str, tuple[int, ...]] = {}  # place → shape in the first run
        self.counts = {path: ZeroCount() for path in outputs}

    def count_zeros(self) -> None:
        """Count elements and zeros in all runs."""
        for tensor, array in self._arrays():
            self._count(tensor, array)

    def _count(self, tensor: ModuleTensor, array: Array) -> None:
        count = self.counts[tensor.path]
        count.elements += array.size
        count.before += array.size - int(np.count_nonzero(array))
        self._shapes.setdefault(tensor.place, array.shape)

    def thresholds(self, pools: Sequence[_Pool], shares: Mapping[str, float]) -> _Masks:
        """The threshold of each pool: of N elements in all runs, number round(share N) by size."""
        pool_of = {path: pool for pool in pools for path in pool}
        wide = any(self._is_wide(tensor) for listed in self._outputs.values() for tensor in listed)
        searches = {pool: CutoffSearch(wide=wide) for pool in pools}
        found: dict[_Pool, tuple[int, int]] = {}
        numbers: dict[_Pool, int] = {}
        rounds = next(iter(searches.values())).rounds
        for number in range(rounds):
            for tensor, array in self._arrays():
                if number == 0:
                    self._count(tensor, array)
                searches[pool_of[tensor.path]].add(keys_of(array.reshape(-1), wide))
            for pool, search in searches.items():
                numbers[pool] = round(shares[pool[0]] * search.added)
                found[pool] = search.finish_round(numbers[pool])
        masks = _Masks()
        for pool, (key, _) in found.items():
            bits = np.uint64(key).view(np.float64) if wide else np.uint32(key).view(np.float32)
            for path in pool:
                if numbers[pool]:
                    masks.thresholds[path] = float(bits)
                else:
                    masks.problems[path] = _no_element(shares[path], searches[pool].added)
        return masks

    def random_masks(
        self, pools: Sequence[_Pool], shares: Mapping[str, float], scores: Scores
    ) -> _Masks:
        """Masks of the elements with the smallest random numbers in each pool."""
        masks = _Masks()
        for pool in pools:
            numbers: dict[str, Array] = {}
            for tensor in itertools.chain.from_iterable(self._outputs[path] for path in pool):
                random = scores.generator(tensor.place)
                assert random is not None  # there is a seed
                numbers[tensor.place] = random.random(self._fixed_sizes(tensor), np.float32)
            joined = np.concatenate([array.reshape(-1) for array in numbers.values()])
            share = shares[pool[0]]
            zeros = np.zeros(joined.size, bool)
            zeros[np.argsort(joined, kind="stable")[: round(share * joined.size)]] = True
            if not zeros.any():
                masks.problems.update(dict.fromkeys(pool, _no_element(share, joined.size)))
            start = 0
            for place, array in numbers.items():
                masks.random[place] = zeros[start : start + array.size].reshape(array.shape)
                start += array.size
        return masks

    def _fixed_sizes(self, tensor: ModuleTensor) -> list[int]:
        """The shape of a mask: the sizes that are fixed in the file; 1 for open ones."""
        shape = self._tagged.inferred.described(tensor.values[0]).shape
        if shape is None:
            return []
        # Sizes of a run: a file can state any.
        sizes = zip(shape, self._shapes[tensor.place], strict=True)
        return [size if isinstance(stated, int) else 1 for stated, size in sizes]

    def _is_wide(self, tensor: ModuleTensor) -> bool:
        described = self._tagged.inferred.described(tensor.values[0])
        return described.dtype == ir.DataType.DOUBLE

    def _arrays(self) -> Iterator[tuple[ModuleTensor, Array]]:
        """The outputs and their elements in each run."""
        names: list[str] = []
        for listed in self._outputs.values():
            names += [str(tensor.tensor) for tensor in listed]
        name = self._tagged.hierarchy.root.simple_class or "model"
        with Runner(self._tagged.model, name, DEFAULTS).opened(names) as run:
            for number, feed in enumerate(self._samples):
                arrays = run(feed)
                for tensor in itertools.chain.from_iterable(self._outputs.values()):
                    array = arrays[str(tensor.tensor)]
                    if nan_in({tensor.place: array}):
                        problem = f"data, run {number}: {tensor.place} has NaN"
                        raise InputError(f"{problem}, which cannot be ordered by size")
                    yield tensor, array


def _no_element(share: float, elements: int) -> str:
    return f"a share of {share:g} of {many(elements, 'element')} is none"


class _Writer:
    """Writes masks into a model, each behind the output of a module call."""

    def __init__(self, edit: Edit) -> None:
        self._edit, self._hooks = edit, Hooks(edit, "masked")

    def write(self, tensor: ModuleTensor, masks: _Masks) -> None:
        """Write the mask of an output, unless it removes nothing but zeros."""
        threshold = masks.thresholds.get(tensor.path)
        gone = masks.random.get(tensor.place)

        def by_size(value: ir.Value, call: Instance) -> list[ir.Node]:
            bound = self._constant(value, f"{tensor.place}.threshold", threshold)
            size = self._edit.node("Abs", [value], call, f"{tensor.place}.abs")
            sizes = [size.outputs[0], bound]
            small = self._edit.node("LessOrEqual", sizes, call, f"{tensor.place}.small")
            return [size, small, self._where(tensor, small.outputs[0], value, call)]

        def at_random(value: ir.Value, call: Instance) -> list[ir.Node]:
            name = self._edit.names.tensors.unused(f"{tensor.place}.mask")
            mask = add_constant(self._edit.graph, np.asarray(gone), name)
            return [self._where(tensor, mask, value, call)]

        if threshold:
            self._hooks.insert(tensor, by_size)
        elif gone is not None and gone.any():
            self._hooks.insert(tensor, at_random)

    def _where(
        self, tensor: ModuleTensor, gone: ir.Value, value: ir.Value, call: Instance
    ) -> ir.Node:
        zero = self._constant(value, f"{tensor.place}.zero", 0.0)
        return self._edit.node("Where", [gone, zero, value], call, f"{tensor.place}.masked")

    def _constant(self, value: ir.Value, name: str, number: Any) -> ir.Value:
        """A stored number with the type of a tensor."""
        dtype = self._edit.tagged.inferred.described(value).dtype
        assert dtype is not None  # it was checked
        array = np.asarray(number, dtype.numpy())
        return add_constant(self._edit.graph, array, self._edit.names.tensors.unused(name))
