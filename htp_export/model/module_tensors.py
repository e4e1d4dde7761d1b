"""The inputs and outputs of module calls in PyTorch, and their tensors in the file.

The export wrote them as signatures. A call without one (in a branch or loop body, or in a file that
a library exported) has the tensors that enter and leave its nodes, as far as these are certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.errors import InputError, SelectorError
from htp_export.format.selectors import Place
from htp_export.format.signatures import Signature
from htp_export.model.regions import Region
from htp_export.reporting.columns import many

IN, OUT = "in", "out"


@dataclass(frozen=True)
class ModuleTensor:
    """One input or output of a module call.

    Attributes:
        path: The module.
        side: ``"in"`` or ``"out"``.
        name: The argument of ``forward``, or the position among its results: ``"0"``.
        call: Number of the call, from 0; None for a module that runs once.
        values: The tensor in the file: one, or one in each branch that contains the call; none if
            it is not in the file.
        problem: The reason why it is not in the file; ``""`` if it is.
        first: Whether it is the first of its side.
    """

    path: str
    side: str
    name: str
    call: int | None
    values: tuple[ir.Value, ...]
    problem: str = ""
    first: bool = False

    @property
    def place(self) -> str:
        """The place as a selector; without a name for the first tensor.

        Examples:
            >>> ModuleTensor("fc", "in", "x", 2, ()).place, ModuleTensor("", "out", "0", None, (), first=True).place
            ('fc#2:in[x]', '.:out')
        """
        number = "" if self.call is None else f"#{self.call}"
        return f"{self.path or '.'}{number}:{self.side}{'' if self.first else f'[{self.name}]'}"

    @property
    def tensor(self) -> str | None:
        """The name of the tensor in the file; None without one, or with several in branches."""
        return str(self.values[0].name) if len(self.values) == 1 else None


def tensors_of(
    region: Region, signatures: Sequence[Signature], values: Mapping[str, ir.Value]
) -> list[ModuleTensor]:
    """The tensors of a module, call by call: inputs in the order of ``forward``, then outputs.

    ``values``: The tensors of the main graph by name.
    """
    calls = range(max(region.calls, len(signatures)))
    found: list[ModuleTensor] = []
    for call in calls:
        number = call if len(calls) > 1 else None
        if call < len(signatures):
            found += _of_signature(region, number, signatures[call], values)
        else:
            found += _of_nodes(region, number)
    return found


def _of_signature(
    region: Region, call: int | None, signature: Signature, values: Mapping[str, ir.Value]
) -> Iterator[ModuleTensor]:
    """The tensors of a call by its signature."""
    outputs = {str(place): name for place, name in enumerate(signature.outputs)}
    for side, names in ((IN, signature.inputs), (OUT, outputs)):
        for place, (argument, name) in enumerate(names.items()):
            value = None if name is None else values.get(name)
            first = place == 0
            if value is not None:
                yield ModuleTensor(region.path, side, argument, call, (value,), "", first)
            else:
                problem = _why_gone(region, name)
                yield ModuleTensor(region.path, side, argument, call, (), problem, first)


def _why_gone(region: Region, name: str | None) -> str:
    if name is not None:
        return f"a tool renamed or removed the tensor {name!r}; take it from the file before that tool, and carry(...)"
    others = ", ".join(map(repr, region.info.fused_with))
    if others or region.fate.is_merged or region.fate.passes_on:
        took = "the modules that it lies between were merged"
        if others:
            took = f"it was merged with {others}"
        before = (
            "tap the file before it is optimised (optimize keeps taps), or optimise with keep_exact"
        )
        return f"{took}; {before}; if torch merged it, export with dynamo=True, optimize=False"
    return "the file has no tensor of this value: it is a constant, was merged with others, or nothing needs it"


def _of_nodes(region: Region, call: int | None) -> Iterator[ModuleTensor]:
    """The tensors that enter and leave the nodes of a call, if there is one on a side.

    Only an exact module has them.
    """
    part = region if call is None else region.call(call)
    if not part.nodes or not region.fate.is_exact:
        meaning = region.fate.meaning
        if region.fate.is_exact:
            meaning = "the file has no nodes of this call"
        yield ModuleTensor(region.path, OUT, "0", call, (), meaning, first=True)
        return
    for side, crossing in ((IN, part.inputs), (OUT, part.outputs)):
        by_graph: dict[object, list[ir.Value]] = {}
        for value in crossing:
            by_graph.setdefault(value.graph, []).append(value)
        values = tuple(listed[0] for listed in by_graph.values())
        several = max(map(len, by_graph.values()), default=0) > 1
        entering = side == IN and len(values) > 1
        if several or entering:
            listed = ", ".join(sorted(str(value.name) for value in crossing))
            problem = f"the file does not say which of {listed} it is"
            yield ModuleTensor(region.path, side, "0", call, (), problem, first=True)
        elif values:
            yield ModuleTensor(region.path, side, "0", call, values, first=True)


def _is_at(tensor: ModuleTensor, place: Place) -> bool:
    """Whether a place selects a tensor of its module."""
    if place.name and tensor.name != place.name:
        return False
    return place.side in ("", tensor.side) and place.call in (None, tensor.call or 0)


def named_tensor(listed: Sequence[ModuleTensor], place: Place, path: str) -> list[ModuleTensor]:
    """The tensors of a module that a place selects: of each call, or of the call that it names.

    Raises:
        SelectorError: If the module has no such call or tensor.
    """
    sides = [tensor for tensor in listed if tensor.side == place.side]
    calls = dict.fromkeys(tensor.call or 0 for tensor in sides)
    if place.call is not None and place.call not in calls:
        raise SelectorError(
            place.text, f"module {path!r} ran {many(max(len(calls), 1), 'time')}, counted from 0"
        )
    wanted = [tensor for tensor in sides if place.call in (None, tensor.call or 0)]
    candidates = wanted
    if not place.name:  # the first tensor of its side
        candidates = [tensor for tensor in wanted if tensor.first]
    found = [tensor for tensor in candidates if _is_at(tensor, place)]
    if found:
        return found
    names = ", ".join(dict.fromkeys(tensor.name for tensor in wanted))
    if not names:
        names = "none that the file knows" if listed else "none, as it never ran"
    raise _no_such_tensor(place, path, names)


def _no_such_tensor(place: Place, path: str, names: str) -> SelectorError:
    """The error for a place that selects no tensor of a module; ``names``: the tensors it has."""
    kind = "input" if place.side == IN else "output"
    return SelectorError(place.text, f"module {path or '.'!r} has no such {kind}; it has: {names}")


def chosen_tensors(
    places: Sequence[Place],
    paths_of: Callable[[str], list[str]],
    tensors: Callable[[str], list[ModuleTensor]],
) -> list[ModuleTensor]:
    """The tensors that some places select, each once, in their order, without excluded ones.

    Args:
        places: The places.
        paths_of: Returns the modules of a selector.
        tensors: Returns all tensors of a module.

    Raises:
        SelectorError: If a selector matches nothing, or everything is excluded.
        InputError: If the tensor of a place of one module is not in the file, or none of them all;
            the message has the reason, and a remedy. Of a place of several modules, those that are
            not in the file have their ``problem``.
    """
    chosen: dict[ModuleTensor, None] = {}
    needed = set[ModuleTensor]()
    for place in places:
        if place.excludes:
            continue
        selected = list(_selected(place, paths_of, tensors))
        chosen.update(dict.fromkeys(selected))
        if len({tensor.path for tensor in selected}) == 1:
            needed.update(selected)
    remaining = list(chosen)
    for place in places:
        if place.excludes:
            paths = {*paths_of(place.modules)}
            remaining = [
                each for each in remaining if each.path not in paths or not _is_at(each, place)
            ]
    if not remaining:
        texts = ", ".join(place.text for place in places)
        raise SelectorError(texts, "excludes every tensor that it selects")
    _refuse_absent(remaining, needed)
    return remaining


def _refuse_absent(chosen: Sequence[ModuleTensor], needed: Set[ModuleTensor]) -> None:
    """Refuse tensors that are not in the file, if they are ``needed`` or all that was chosen."""
    absent = [tensor for tensor in chosen if tensor.problem]
    for tensor in absent:
        if tensor in needed or len(absent) == len(chosen):
            raise InputError(f"{tensor.place}: {tensor.problem}")


def _selected(
    place: Place,
    paths_of: Callable[[str], list[str]],
    tensors: Callable[[str], list[ModuleTensor]],
) -> Iterator[ModuleTensor]:
    """The tensors that one place selects."""
    listed = {path: tensors(path) for path in paths_of(place.modules)}
    # A ModuleList, which "**" also selects, has no tensors: it is no error beside other modules.
    ran = {path: each for path, each in listed.items() if each}
    for path, each in (ran or listed).items():
        yield from named_tensor(each, place, path)
