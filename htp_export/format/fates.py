"""The fates of modules, with their meanings, colours and properties: other code does not compare names."""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """The state of a module in an exported graph; each is defined in ``docs/format.md``.

    A new fate is a line here, properties below that differ from the other fates, and the evidence
    for it (`htp_export.lineage.fates`). ``meaning`` is a clause, ``tone`` the colour on pages:
    ``"accent"``, ``"warn"``, or ``""`` for that of the text.

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
        """Return the fate of a module if only its number of calls is known."""
        return cls.COMPUTED if calls else cls.UNCALLED

    @property
    def remark(self) -> str:
        """The name of the fate to show to a user; ``""`` for ``computed``."""
        return "" if self.is_exact else self.value

    @property
    def is_exact(self) -> bool:
        """Whether a module has nodes, and its boundary is exactly its inputs and outputs in PyTorch."""
        return self is Fate.COMPUTED

    @property
    def is_merged(self) -> bool:
        """Whether a module has such a boundary only together with the modules in ``fused_with``."""
        return self is Fate.FUSED

    @property
    def does_work(self) -> bool:
        """Whether nodes compute the module; for a merged module, these may be nodes of its partners."""
        return self in (Fate.COMPUTED, Fate.FUSED)

    @property
    def has_result(self) -> bool:
        """Whether a module produces tensors that the model needs."""
        return self.does_work or self.is_folded

    @property
    def is_folded(self) -> bool:
        """Whether the results of a module are the same in every run, and were replaced by constants."""
        return self is Fate.CONSTANT

    @property
    def is_needless(self) -> bool:
        """Whether a module ran, but no output of the model depends on it."""
        return self is Fate.DEAD

    @property
    def passes_on(self) -> bool:
        """Whether a module returns its input, which another module produced."""
        return self is Fate.IDENTITY

    @property
    def ran(self) -> bool:
        """Whether the module's ``forward`` ran."""
        return self is not Fate.UNCALLED
