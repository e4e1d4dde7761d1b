"""What a module computes from products of tensors: recorded while its ``forward`` runs, so that it can run again.

Which product is the first operation of an attention shows later, at the softmax of what is computed
from it. Then the operations between run a second time, inside a step. Tensors are the same if they
are the same object in the same state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from htp_export.exporter.capture.torch_internals import changes_of
from htp_export.exporter.capture.torchscript_internals import take_over_trace

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
        """The tensors among the arguments, which it may have changed, and those of the result."""
        return [*self.tensors, *_tensors(result)]

    def with_tensors(self, tensors: Iterable[Tensor]) -> AttentionCall:
        """The call with other tensors, in the order of `tensors`."""
        others = iter(tensors)
        args, kwargs = tree_map_only(
            Tensor, lambda _: next(others), (tuple(self.args), dict(self.kwargs))
        )
        return AttentionCall(self.function, args, kwargs)


class _Origin(NamedTuple):
    """Where a tensor got its present state."""

    operation: _Operation
    place: int  # which tensor of the operation's outcome it is
    state: int  # how often it had been changed in place then


@dataclass(frozen=True, eq=False)
class _Operation:
    """A call that was recorded."""

    number: int  # its place in the order of execution
    call: AttentionCall
    # The origin of each of its tensors; None for one that is not computed from products
    origins: tuple[_Origin | None, ...]
    states: tuple[int, ...]  # how often each of its tensors had been changed in place before
    outcome: tuple[Tensor, ...]  # its arguments and results, see `AttentionCall.outcome`
    places: tuple[int, ...]  # which of these it made or changed
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
        """Run the operations, on `tensors` or others in their place, and return the result of the last one."""
        given = {id(own): tensor for own, tensor in zip(self.tensors, tensors, strict=True)}
        outcomes: dict[_Operation, list[Tensor]] = {}
        for operation in self._operations:
            read = [
                given[id(tensor)] if origin is None or origin.operation not in outcomes
                else outcomes[origin.operation][origin.place]
                for tensor, origin in zip(operation.call.tensors, operation.origins, strict=True)
            ]  # fmt: skip
            call = operation.call.with_tensors(read)
            outcomes[operation] = call.outcome(call())
        self._take_over(outcomes)
        return outcomes[self._result.operation][self._result.place]

    def _take_over(self, outcomes: Mapping[_Operation, Sequence[Tensor]]) -> None:
        """Let the new tensors stand for the ones of the first run in a trace."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for operation, tensors in outcomes.items():
            for place in operation.places:
                first = operation.outcome[place]
                pairs.pop(id(first), None)
                pairs[id(first)] = (first, tensors[place])
        take_over_trace(list(pairs.values()))


class Recording:
    """What one run of a module's ``forward`` computes from products.

    A product with a parameter, or with what is computed from parameters alone, is a linear map and
    does not count.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._origins: dict[int, tuple[Tensor, _Origin]] = {}
        self._weights: dict[int, Tensor] = {}
        self._of_parameters: dict[int, Tensor] = {}
        self._number = 0

    def is_attention_product(self, call: AttentionCall) -> bool:
        """Return whether a call is a product of two tensors that the model computes from its inputs."""
        if not is_product(call.function) or "out" in call.kwargs:
            return False
        factors = call.tensors[-2:]
        return len(factors) == 2 and not any(map(self._is_of_parameters, factors))

    def reads(self, call: AttentionCall) -> bool:
        """Return whether a call reads something that is computed from a product or from weights."""
        return self.reads_weights(call) or any(
            id(tensor) in self._origins for tensor in call.tensors
        )

    def reads_weights(self, call: AttentionCall) -> bool:
        """Return whether a call reads something that is computed from the result of a softmax, see `note_weights`."""
        return any(id(tensor) in self._weights for tensor in call.tensors)

    def note_weights(self, weights: Tensor) -> None:
        """Note the result of the softmax of what was computed from a product."""
        self._weights[id(weights)] = weights

    def note_parameters(self, call: AttentionCall, result: Any) -> None:
        """Note a call that may read parameters alone."""
        tensors = call.tensors
        if tensors and all(map(self._is_of_parameters, tensors)):
            self._of_parameters.update((id(tensor), tensor) for tensor in _tensors(result))

    def watch(self, call: AttentionCall, problem: str = "") -> Callable[[Any], None]:
        """Note the state before a call of a product, or of what reads its result, and return what notes the result."""
        tensors = call.tensors
        origins = tuple(self._origin(tensor) for tensor in tensors)
        states = tuple(map(changes_of, tensors))
        product = self.is_attention_product(call)
        from_weights = self.reads_weights(call)

        def note(result: Any) -> None:
            outcome = call.outcome(result)
            if from_weights:
                self._weights.update((id(tensor), tensor) for tensor in _tensors(result))
            if not product and not any(origins):
                return
            changed = [
                changes_of(tensor) != state for tensor, state in zip(tensors, states, strict=True)
            ]
            found = problem or _problem(call, outcome, origins, states, changed)
            self._number += 1
            places = tuple(
                place for place in range(len(outcome)) if place >= len(tensors) or changed[place]
            )
            operation = _Operation(
                self._number, call, origins, states, tuple(outcome), places, found, product
            )
            for place in places:
                tensor = outcome[place]
                self._origins[id(tensor)] = (tensor, _Origin(operation, place, changes_of(tensor)))

        return note

    def replay(self, tensor: Tensor) -> Replay | None:
        """Return the operations that compute a tensor, from the nearest products on; None if it is of none."""
        origin = self._origin(tensor)
        if origin is None:
            return None
        operations = sorted(_between(origin.operation), key=lambda operation: operation.number)
        problems = [operation.problem for operation in operations if operation.problem]
        if changes_of(tensor) != origin.state:
            problems.append(_CHANGED)
        given: dict[int, Tensor] = {}
        for operation in operations:
            read = zip(operation.call.tensors, operation.origins, operation.states, strict=True)
            for argument, source, state in read:
                if source is None or source.operation not in operations:
                    given[id(argument)] = argument
                    problems += [_CHANGED] if changes_of(argument) != state else []
        return Replay(next(iter(problems), ""), tuple(given.values()), tuple(operations), origin)

    def _origin(self, tensor: Tensor) -> _Origin | None:
        return self._origins[id(tensor)][1] if id(tensor) in self._origins else None

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._of_parameters


_CHANGED = "a tensor that it reads is changed in place, through another tensor or later"


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
    if any(
        origin is not None and origin.state != state
        for origin, state in zip(origins, states, strict=True)
    ):
        return _CHANGED
    if any(origin is None and written for origin, written in zip(origins, changed, strict=True)):
        return "a tensor that is not computed from the product is changed in place"
    return (
        f"{call.function.__name__} draws random numbers, or may"
        if _may_be_random(call.function)
        else ""
    )


def _may_be_random(function: Callable[..., Any]) -> bool:
    """Whether a function may draw random numbers, by torch's own tags; True for one that is made of others."""
    operator = getattr(torch.ops.aten, function.__name__, None)
    if operator is None:
        return getattr(function, "__module__", "") == functional.__name__
    return any(
        torch.Tag.nondeterministic_seeded in getattr(operator, name).tags
        for name in operator.overloads()
    )


def _between(last: _Operation) -> set[_Operation]:
    """An operation and those that its result is computed by, up to the nearest products."""
    found, open_operations = {last}, [last]
    while open_operations:
        operation = open_operations.pop()
        sources = (
            ()
            if operation.product
            else (origin.operation for origin in operation.origins if origin is not None)
        )
        new = set(sources) - found
        found |= new
        open_operations += new
    return found


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
