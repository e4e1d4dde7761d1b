"""What a module may become in a search: weights are removed, then it gets a precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.precisions import Precision

__all__ = ["ModuleChoice", "choice_of", "choices_of", "kept_precision", "written_precision"]

_JOINT = "+"


@dataclass(frozen=True)
class ModuleChoice:
    """What a module may become.

    Attributes:
        sparsity: What is removed from its weights, a value of a plan for ``prune``; None for nothing.
        precision: What it is quantized to afterwards.
    """

    sparsity: Sparsity | None = None
    precision: Precision = field(default_factory=lambda: kept_precision())

    @property
    def name(self) -> str:
        """What is removed and the precision, as in ``2:4+int8``; one of them alone if there is no other."""
        if self.sparsity is None:
            return self.precision.name
        return str(self.sparsity) + (f"{_JOINT}{self.precision.name}" if self.is_quantized else "")

    @property
    def is_quantized(self) -> bool:
        """Whether the precision changes anything."""
        return not self.precision.is_kept

    @property
    def changes_nothing(self) -> bool:
        """Whether the module stays as it is."""
        return self.sparsity is None and not self.is_quantized

    @property
    def is_dropped(self) -> bool:
        """Whether the module is removed."""
        return self.sparsity is not None and self.sparsity.kind == "blocks"

    @property
    def written(self) -> Any:
        """The choice as spaces write it: its name, or a mapping."""
        precision = written_precision(self.precision)
        if self.sparsity is None or isinstance(precision, str):
            return precision if self.sparsity is None else self.name
        return {"prune": str(self.sparsity), **precision}


def choice_of(value: Any) -> ModuleChoice:
    """Read a value of a space.

    Args:
        value: A precision as in a plan for ``quantize``, a value of a plan for ``prune``, or both: as text with ``+``
            between them, or as a mapping with ``prune`` and the fields of a precision.

    Raises:
        InputError: If it is none of these, or a module is dropped and quantized.

    Examples:
        >>> [choice_of(value).name for value in ("int8", 0.5, "2:4+int8", {"prune": "rank:25%", "precision": "int4"})]
        ['int8', '0.5', '2:4+int8', 'rank:25%+int4']
    """
    from htp_export.capabilities.prune.sparsities import sparsity_of
    from htp_export.capabilities.quantize.precisions import Precision, precision_of

    if isinstance(value, ModuleChoice):
        return value
    if isinstance(value, Mapping):
        fields = dict(value)
        removed = fields.pop("prune", None)
        sparsity = None if removed is None else sparsity_of(removed)
        choice = ModuleChoice(sparsity, precision_of(fields) if fields or removed is None else kept_precision())
    elif isinstance(value, str):
        choice = _joined(value)
    elif isinstance(value, Precision):
        choice = ModuleChoice(None, value)
    else:
        choice = ModuleChoice(sparsity_of(value))
    if choice.is_dropped and choice.is_quantized:
        raise InputError(f"choice {choice.name!r}: nothing is left to quantize of a module that is dropped")
    return choice


def _joined(text: str) -> ModuleChoice:
    """A precision, a value for prune, or both."""
    from htp_export.capabilities.prune.sparsities import sparsity_of
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    precisions, sparsities = [], []
    for part in map(str.strip, text.split(_JOINT)):
        if part in PRECISIONS:
            precisions.append(PRECISIONS[part])
        elif part == "drop" or ":" in part or part.replace(".", "", 1).isdecimal():
            sparsities.append(sparsity_of(part))
        else:
            raise InputError(
                f"there is no precision {part!r}; there are {', '.join(PRECISIONS)}, and values of prune such as 0.5, "
                "2:4, channels:0.25, rank:25% and drop"
            )
    if len(precisions) > 1 or len(sparsities) > 1:
        raise InputError(f"choice {text!r}: write one value of prune and one precision, such as '2:4+int8'")
    return ModuleChoice(sparsities[0] if sparsities else None, precisions[0] if precisions else kept_precision())


def kept_precision() -> Precision:
    """The precision of a module that is not quantized."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    return PRECISIONS["fp32"]


def choices_of(values: Any, known: dict[str, ModuleChoice]) -> list[str]:
    """The names of several choices, which are added to those that are known.

    Raises:
        InputError: If there are none, or two choices have one name.
    """
    from htp_export.capabilities.quantize.precisions import PRECISIONS, Precision

    listed: Iterable[Any] = [values] if isinstance(values, str | int | float | Precision | Mapping) else values
    found = [choice_of(value) for value in listed]
    for choice in found:
        if known.setdefault(choice.name, choice) != choice:
            raise InputError(f"two precisions are named {choice.name!r}; give one of them another name")
    if not found:
        raise InputError(f"give precisions to choose from, of {', '.join(PRECISIONS)}, or values of prune")
    return list(dict.fromkeys(choice.name for choice in found))


def written_precision(precision: Precision) -> Any:
    """A precision as plans write it: its name, or a mapping with what differs."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    known = PRECISIONS.get(precision.name)
    if known == precision:
        return precision.name
    fields = {key: value for key, value in vars(precision).items() if key not in ("bits", "options")}
    base = known or next(each for each in PRECISIONS.values() if each.method == precision.method)
    changed = {key: value for key, value in fields.items() if getattr(base, key) != value}
    return {"precision": base.name, **changed, **precision.options}
