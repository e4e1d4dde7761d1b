"""The words of a module's ``fate``, and all that is the same of every module with one: asked for, not compared."""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """What an export can make of a module; each is defined in ``docs/format.md``.

    A new one is a line here, the answers below where they differ from the others', and the evidence
    that tells it (`htp_export.lineage.fates`). ``meaning`` is a clause, ``tone`` the colour on
    pages: ``"accent"``, ``"warn"``, or ``""`` for that of the text.

    Examples:
        >>> Fate("dead").meaning, Fate.DEAD.tone, f"{Fate.DEAD}"
        ('nothing that the model returns needs it', 'warn', 'dead')
    """

    meaning: str
    tone: str

    COMPUTED = (
        "computed",
        "it has nodes of its own, with the inputs and outputs that it has in PyTorch",
    )
    IDENTITY = "identity", "it gives back what it is given"
    FUSED = (
        "fused",
        "merged with its neighbours: a tensor at its border no longer exists, or none of its nodes is left",
        "accent",
    )
    CONSTANT = (
        "constant",
        "it was folded into constants, as it does not depend on the model's inputs",
        "accent",
    )
    DEAD = "dead", "nothing that the model returns needs it", "warn"
    UNCALLED = "uncalled", "its forward did not run", "warn"

    def __new__(cls, word: str, meaning: str = "", tone: str = "") -> Fate:
        fate = str.__new__(cls, word)
        fate._value_, fate.meaning, fate.tone = word, meaning, tone
        return fate

    def __repr__(self) -> str:
        return repr(self.value)

    @classmethod
    def of_calls(cls, calls: int) -> Fate:
        """The fate of a module of which only the number of runs is known."""
        return cls.COMPUTED if calls else cls.UNCALLED

    @property
    def remark(self) -> str:
        """The word, where a reader is to see it: ``""`` for modules that are as in PyTorch."""
        return "" if self.is_exact else self.value

    @property
    def is_exact(self) -> bool:
        """Whether a module has nodes, and a boundary of nothing but its inputs and outputs in PyTorch: it is closed."""
        return self is Fate.COMPUTED

    @property
    def is_merged(self) -> bool:
        """Whether only a module and others together are closed: ``fused_with``."""
        return self is Fate.FUSED

    @property
    def does_work(self) -> bool:
        """Whether nodes do the work of a module; of merged ones, maybe those of others."""
        return self in (Fate.COMPUTED, Fate.FUSED)

    @property
    def has_result(self) -> bool:
        """Whether a module gives tensors of its own that the model needs."""
        return self.does_work or self.is_folded

    @property
    def is_folded(self) -> bool:
        """Whether a module gives the same in every run, and constants stand in its place."""
        return self is Fate.CONSTANT

    @property
    def is_needless(self) -> bool:
        """Whether a module ran, and the model does without it."""
        return self is Fate.DEAD

    @property
    def passes_on(self) -> bool:
        """Whether a module gives back a tensor that another one made."""
        return self is Fate.IDENTITY

    @property
    def ran(self) -> bool:
        """Whether the module's ``forward`` ran."""
        return self is not Fate.UNCALLED
