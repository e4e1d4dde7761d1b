"""The space of an architecture search: names with their choices, and the choices of one candidate."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from htp_export.errors import InputError


class ChosenValues(dict[str, Any]):
    """The choices of a candidate by name, which notes the names that are read."""

    def __init__(self, choices: Mapping[str, Any]) -> None:
        super().__init__(choices)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The choice of a name, or a default."""
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        """The names; all of them count as read."""
        self.read.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        """The names and their choices; all of them count as read."""
        self.read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        """The choices; all of them count as read."""
        self.read.update(super().keys())
        return super().values()


class ArchitectureSpace:
    """Names with their choices, each of which also has a text for the study.

    Attributes:
        choices: Name → choices.
        texts: Name → the text of each choice.

    Raises:
        InputError: The space has no names, a name has no choices or two equal ones, or a choice is
            no plain value, which a storage could not keep.
    """

    def __init__(self, space: object) -> None:
        if not isinstance(space, Mapping) or not space:
            raise InputError(
                "the space of a build function is a mapping: name → list of choices, such as "
                '{"num_layers": [2, 4]}'
            )
        self.choices: dict[str, list[Any]] = {}
        self.texts: dict[str, list[str]] = {}
        for name, choices in space.items():
            is_list = isinstance(choices, Sequence) and not isinstance(choices, str | bytes)
            if not is_list or not choices:
                raise InputError(f"space: {name!r} needs a list of choices, not {choices!r}")
            texts = [_text_of(name, choice) for choice in choices]
            if len(set(texts)) < len(texts):
                raise InputError(f"space: {name!r} has two equal choices: {', '.join(texts)}")
            self.choices[str(name)], self.texts[str(name)] = list(choices), texts

    @property
    def size(self) -> int:
        """The number of combinations."""
        return math.prod(map(len, self.choices.values()))

    def different(self, count: int, seed: int) -> list[dict[str, str]]:
        """Different combinations, chosen at random: the texts of their choices."""
        combinations: list[dict[str, str]] = []
        for number in random.Random(seed).sample(range(self.size), count):
            texts: dict[str, str] = {}
            for name, names in self.texts.items():
                number, place = divmod(number, len(names))
                texts[name] = names[place]
            combinations.append(texts)
        return combinations

    def choice(self, texts: Mapping[str, str]) -> ChosenValues:
        """The choices that have these texts."""
        chosen: dict[str, Any] = {}
        for name, text in texts.items():
            chosen[name] = self.choices[name][self.texts[name].index(text)]
        return ChosenValues(chosen)


def _text_of(name: object, choice: object) -> str:
    if isinstance(choice, str):
        return choice
    try:
        return json.dumps(choice, allow_nan=False)
    except (TypeError, ValueError):
        raise InputError(
            f"space: {name!r} has the choice {choice!r}; a choice is a text, a number, true or false, "
            "or a list of these: give a name, from which the build function makes the object"
        ) from None
