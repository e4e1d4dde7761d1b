"""Signatures: the tensors of a file that are the inputs and outputs of each module call in PyTorch.

An export writes them as ``htp.signatures``; see ``docs/format.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from htp_export.format import tags


@dataclass(frozen=True)
class Signature:
    """The tensors of one call of a module.

    Attributes:
        inputs: Argument of ``forward`` (``hidden_states``, ``states.1``) → name of the tensor in
            the file, None if the file has no tensor of that value: a constant, or a tensor that was
            merged with its neighbours.
        outputs: The names of the tensors that ``forward`` returned, in order.
    """

    inputs: Mapping[str, str | None]
    outputs: tuple[str | None, ...]

    @property
    def taken(self) -> set[str]:
        """The names of the input tensors that the file has."""
        return {name for name in self.inputs.values() if name is not None}

    @property
    def given(self) -> set[str]:
        """The names of the output tensors that the file has."""
        return {name for name in self.outputs if name is not None}

    def renamed(self, name_of: Callable[[str], str | None]) -> Signature:
        """Return the signature for another file; ``name_of`` returns the new name of a tensor, None if it is gone."""

        def new_name(name: str | None) -> str | None:
            return None if name is None else name_of(name)

        inputs = {argument: new_name(name) for argument, name in self.inputs.items()}
        return Signature(inputs, tuple(map(new_name, self.outputs)))


def renamed_signatures(
    signatures: Mapping[str, Sequence[Signature]], name_of: Callable[[str], str | None]
) -> dict[str, tuple[Signature, ...]]:
    """Return the signatures of modules for another file; ``name_of`` as in `Signature.renamed`."""
    renamed: dict[str, tuple[Signature, ...]] = {}
    for path, calls in signatures.items():
        renamed[path] = tuple(call.renamed(name_of) for call in calls)
    return renamed


def is_unread(calls: Sequence[Signature]) -> bool:
    """Return whether each call of a module returned tensors of which the file has none."""
    return bool(calls) and all(call.outputs and not call.given for call in calls)


def signatures_to_json(signatures: Mapping[str, Sequence[Signature]]) -> str:
    """Return the value of ``htp.signatures``: module path → its calls in order."""
    entries: dict[str, list[Any]] = {}
    for path, calls in signatures.items():
        entries[path] = [[dict(call.inputs), call.outputs] for call in calls]
    return tags.json_text(entries)


def signatures_from_json(text: str) -> dict[str, tuple[Signature, ...]]:
    """Parse the value of ``htp.signatures``; a ValueError names the module at fault.

    Examples:
        >>> signatures_from_json('{"fc":[[{"input":"x"},["linear"]]]}')["fc"][0].outputs
        ('linear',)
    """
    entries = tags.json_object(tags.SIGNATURES, text, "module paths")
    return {path: _calls(path, calls) for path, calls in entries.items()}


def _calls(path: str, calls: object) -> tuple[Signature, ...]:
    if not isinstance(calls, list):
        raise ValueError(f"{tags.SIGNATURES}: module {path!r} has no list of calls")  # noqa: TRY004 - it is a bad value
    signatures = []
    for call in calls:
        match call:
            case [dict() as inputs, list() as outputs] if _are_names(inputs.values(), outputs):
                signatures.append(Signature(inputs, tuple(outputs)))
            case _:
                raise ValueError(
                    f"{tags.SIGNATURES}: module {path!r} has a call that is not [inputs, outputs]"
                )
    return tuple(signatures)


def _are_names(*groups: Iterable[object]) -> bool:
    return all(name is None or isinstance(name, str) for name in itertools.chain(*groups))
