"""Operations of a module that depend on products of tensors, recorded so that they can run again.

Which product is the first operation of an attention is only known at the softmax that depends on
it. Then the operations between them run a second time, inside a step. Tensors are the same if they
are the same object in the same state.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from htp_export.exporter.capture.torch_internals import changes_of
from htp_export.exporter.capture.torchscript_internals import take_over_trace
from htp_export.model.neighbours import reached

_PRODUCTS = {
    *(torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm, torch.einsum),
    *(
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.bmm,
        Tensor.mm,
        Tensor.baddbmm,
        Tensor.addmm,
    ),
}
_SOFTMAXES = {torch.softmax, torch.special.softmax, Tensor.softmax, functional.softmax}


def is_product(function: Callable[..., Any]) -> bool:
    """Whether a function of torch contracts its last two tensors."""
    return function in _PRODUCTS


def is_softmax(function: Callable[..., Any]) -> bool:
    """Whether a function of torch computes the softmax of its first tensor."""
    return function in _SOFTMAXES


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A call of a function of torch."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors((self.args, self.kwargs))

    def __call__(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)

    def on(self, *tensors: Tensor) -> Any:
        """Call the function on other tensors."""
        return self.with_tensors(tensors)()

    def outcome(self, result: Any) -> list[Tensor]:
        """The tensors among the arguments, which may be changed, and the tensors of the result."""
        return [*self.tensors, *_tensors(result)]

    def with_tensors(self, tensors: Iterable[Tensor]) -> AttentionCall:
        """The call with other tensors in place of its own, in the order of `tensors`."""
        others = iter(tensors)
        args, kwargs = tree_map_only(
            Tensor, lambda _: next(others), (tuple(self.args), dict(self.kwargs))
        )
        return AttentionCall(self.function, args, kwargs)


class _Origin(NamedTuple):
    """The operation that set the current state of a tensor."""

    operation: _Operation
    place: int  # position of the tensor in the operation's outcome
    state: int  # how often it had been changed in place


@dataclass(frozen=True, eq=False)
class _Operation:
    """A recorded call."""

    number: int  # its position in the order of execution
    call: AttentionCall
    # the origin of each of its tensors; None for one that does not depend on products
    origins: tuple[_Origin | None, ...]
    states: tuple[int, ...]  # how often each of its tensors had been changed in place before
    outcome: tuple[Tensor, ...]  # its arguments and results, see `AttentionCall.outcome`
    places: tuple[int, ...]  # positions in the outcome of new and changed tensors
    problem: str  # why it cannot run again; empty if it can
    product: bool  # whether it is a product


@dataclass(frozen=True)
class Replay:
    """Operations that run again."""

    problem: str  # why they cannot; empty if they can
    tensors: tuple[Tensor, ...]  # the tensors that they read and do not compute
    _operations: tuple[_Operation, ...]
    _result: _Origin

    def run(self, *tensors: Tensor) -> Tensor:
        """Run the operations on `tensors`, or others in their place; return the last result."""
        replacements = {id(own): tensor for own, tensor in zip(self.tensors, tensors, strict=True)}
        outcomes: dict[_Operation, list[Tensor]] = {}
        for operation in self._operations:
            inputs = []
            for own, origin in zip(operation.call.tensors, operation.origins, strict=True):
                if origin is None or origin.operation not in outcomes:
                    inputs.append(replacements[id(own)])
                else:
                    inputs.append(outcomes[origin.operation][origin.place])
            call = operation.call.with_tensors(inputs)
            outcomes[operation] = call.outcome(call())
        self._take_over(outcomes)
        return outcomes[self._result.operation][self._result.place]

    def _take_over(self, outcomes: Mapping[_Operation, Sequence[Tensor]]) -> None:
        """Substitute the new tensors for the tensors of the first run in a trace."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for operation, tensors in outcomes.items():
            for place in operation.places:
                first = operation.outcome[place]
                pairs.pop(id(first), None)  # the last change decides the order
                pairs[id(first)] = (first, tensors[place])
        take_over_trace(list(pairs.values()))


class Recording:
    """The operations of one run of a module's ``forward`` that depend on products.

    A product with a parameter, or with a tensor computed from parameters alone, is a linear map and
    does not count.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._origins: dict[int, tuple[Tensor, _Origin]] = {}
        self._weights: dict[int, Tensor] = {}
        self._of_parameters: dict[int, Tensor] = {}
        self._number = 0

    def is_attention_product(self, call: AttentionCall) -> bool:
        """Whether a call is a product of two tensors that depend on the model's inputs."""
        if not is_product(call.function) or "out" in call.kwargs:
            return False
        factors = call.tensors[-2:]
        return len(factors) == 2 and not any(map(self._is_of_parameters, factors))

    def reads(self, call: AttentionCall) -> bool:
        """Whether a call depends on a product or on weights."""
        return self.reads_weights(call) or any(
            id(tensor) in self._origins for tensor in call.tensors
        )

    def reads_weights(self, call: AttentionCall) -> bool:
        """Whether a call depends on a softmax, see `note_weights`."""
        return any(id(tensor) in self._weights for tensor in call.tensors)

    def note_weights(self, weights: Tensor) -> None:
        """Record a softmax whose input depends on the query-key product."""
        self._weights[id(weights)] = weights

    def note_parameters(self, call: AttentionCall, result: Any) -> None:
        """Record the results of a call if it depends on parameters alone."""
        tensors = call.tensors
        if tensors and all(map(self._is_of_parameters, tensors)):
            self._of_parameters.update((id(tensor), tensor) for tensor in _tensors(result))

    def watch(self, call: AttentionCall, problem: str = "") -> Callable[[Any], None]:
        """Save the state before a call; return a function that records its result.

        The call is a product, or depends on one. ``problem`` is a reason why it cannot run again.
        """
        tensors = call.tensors
        origins = tuple(self._origin(tensor) for tensor in tensors)
        states = tuple(map(changes_of, tensors))
        is_product = self.is_attention_product(call)
        from_weights = self.reads_weights(call)

        def record(result: Any) -> None:
            outcome = call.outcome(result)
            if from_weights:
                self._weights.update((id(tensor), tensor) for tensor in _tensors(result))
            if not is_product and not any(origins):
                return
            changed = [
                changes_of(tensor) != state for tensor, state in zip(tensors, states, strict=True)
            ]
            new = [True] * (len(outcome) - len(tensors))
            places = tuple(itertools.compress(range(len(outcome)), (*changed, *new)))
            self._number += 1
            operation = _Operation(
                self._number,
                call,
                origins,
                states,
                tuple(outcome),
                places,
                problem or _problem(call, outcome, origins, states, changed),
                is_product,
            )
            for place in places:
                tensor = outcome[place]
                self._origins[id(tensor)] = (tensor, _Origin(operation, place, changes_of(tensor)))

        return record

    def replay(self, tensor: Tensor) -> Replay | None:
        """The operations that compute a tensor from the nearest products on.

        None if it does not depend on a product.
        """
        origin = self._origin(tensor)
        if origin is None:
            return None
        operations = sorted(_between(origin.operation), key=lambda operation: operation.number)
        problems = [operation.problem for operation in operations if operation.problem]
        if changes_of(tensor) != origin.state:
            problems.append(_CHANGED)
        inputs: dict[int, Tensor] = {}
        for operation in operations:
            read = zip(operation.call.tensors, operation.origins, operation.states, strict=True)
            for argument, source, state in read:
                if source is not None and source.operation in operations:
                    continue
                inputs[id(argument)] = argument
                if changes_of(argument) != state:
                    problems.append(_CHANGED)
        problem = problems[0] if problems else ""
        return Replay(problem, tuple(inputs.values()), tuple(operations), origin)

    def _origin(self, tensor: Tensor) -> _Origin | None:
        if id(tensor) in self._origins:
            return self._origins[id(tensor)][1]
        return None

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._of_parameters


_CHANGED = "a tensor that it reads is changed in place, through another tensor or later"
"""Why an operation cannot run again."""


def _problem(
    call: AttentionCall,
    outcome: Sequence[Tensor],
    origins: Sequence[_Origin | None],
    states: Sequence[int],
    changed: Sequence[bool],
) -> str:
    """Why a call cannot run again with the same result; empty if it can."""
    if any(tensor.is_inference() for tensor in outcome):
        return "in inference mode, torch does not count changes in place"
    for origin, state in zip(origins, states, strict=True):
        if origin is not None and origin.state != state:
            return _CHANGED
    for origin, is_changed in zip(origins, changed, strict=True):
        if origin is None and is_changed:
            return "a tensor that is not computed from the product is changed in place"
    if _may_be_random(call.function):
        return f"{call.function.__name__} draws random numbers, or may"
    return ""


def _may_be_random(function: Callable[..., Any]) -> bool:
    """Whether a function may draw random numbers, by torch's tags.

    True for a function of ``torch.nn.functional`` that is no operator.
    """
    operator = getattr(torch.ops.aten, function.__name__, None)
    if operator is None:
        return getattr(function, "__module__", "") == functional.__name__
    return any(
        torch.Tag.nondeterministic_seeded in getattr(operator, name).tags
        for name in operator.overloads()
    )


def _between(last: _Operation) -> set[_Operation]:
    """An operation and the operations that its result depends on, up to the nearest products."""

    def sources(operation: _Operation) -> list[_Operation]:
        if operation.product:
            return []
        return [origin.operation for origin in operation.origins if origin is not None]

    return set(reached([last], sources))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
