"""Signatures: the tensors of a file that are the inputs and outputs of each module call in PyTorch.

The export writes them as ``htp.signatures``; see ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
        """The tensors that the call took."""
        return {name for name in self.inputs.values() if name is not None}

    @property
    def given(self) -> set[str]:
        """The tensors that it gave back."""
        return {name for name in self.outputs if name is not None}

    def renamed(self, name_of: Callable[[str], str | None]) -> Signature:
        """The same in another file, where tensors have other names, or None where they are gone."""

        def name(old: str | None) -> str | None:
            return None if old is None else name_of(old)

        return Signature(
            {key: name(old) for key, old in self.inputs.items()}, tuple(map(name, self.outputs))
        )


def is_unread(calls: Sequence[Signature]) -> bool:
    """Whether the calls of a module gave tensors back, and none of these is in the file."""
    return bool(calls) and all(call.outputs and not call.given for call in calls)


def signatures_to_json(signatures: Mapping[str, Sequence[Signature]]) -> str:
    """Return the value of ``htp.signatures``: module path → its calls in order."""
    plain = {
        path: [[dict(call.inputs), call.outputs] for call in calls]
        for path, calls in signatures.items()
    }
    return tags.json_text(plain)


def signatures_from_json(text: str) -> dict[str, tuple[Signature, ...]]:
    """Parse the value of ``htp.signatures``; a ValueError names the module at fault.

    Examples:
        >>> signatures_from_json('{"fc":[[{"input":"x"},["linear"]]]}')["fc"][0].outputs
        ('linear',)
    """
    listed = tags.json_object(tags.SIGNATURES, text, "module paths")
    return {path: _calls(path, calls) for path, calls in listed.items()}


def _calls(path: str, calls: object) -> tuple[Signature, ...]:
    if not isinstance(calls, list):
        raise ValueError(f"{tags.SIGNATURES}: module {path!r} has no list of calls")  # noqa: TRY004 - it is a bad value
    signatures = []
    for call in calls:
        match call:
            case [dict() as inputs, list() as outputs] if all(
                name is None or isinstance(name, str) for name in (*inputs.values(), *outputs)
            ):
                signatures.append(Signature(inputs, tuple(outputs)))
            case _:
                raise ValueError(
                    f"{tags.SIGNATURES}: module {path!r} has a call that is not [inputs, outputs]"
                )
    return tuple(signatures)
