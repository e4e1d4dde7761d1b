"""Regular expressions that are matched in time linear in the text, whatever the expression is.

``re`` tries the ways in which an expression can match one after the other, which are more than can
be tried for some expressions of a few characters: ``(.|.)*!``. Expressions come with files of
others: selectors in the steps of a model file, patterns in the config of an adapter. They are
matched here with all ways at once, as a nondeterministic automaton (Thompson, "Regular expression
search algorithm", 1968; https://swtch.com/~rsc/regexp/regexp1.html).

The syntax is that of ``re``, which parses it, without what is no regular language: references to
groups, and groups that give nothing back (``(?>...)``, ``a*+``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined] # the parser of `re`, which has no public name
from typing import Any, TypeAlias

_MOST_STATES = 50_000
"""States of an automaton: an expression takes about one for each letter, and repeats its parts."""

_FREE_VISITS, _MOST_VISITS = 1_000_000, 50
"""Visits of states, which take half a microsecond each: so many at first, and so many for each character of the texts.

Steps that were taken before are kept, and visit none. Expressions that people write have a few
different ones.
"""

_VISITS_OF_A_CONDITION = 4
"""Visits that one condition at one place counts as."""

_NONE: frozenset[object] = frozenset()

_MOST_KEPT = 200_000
"""States in the steps that are kept."""

_OWN_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.ASCII
"""Flags that decide what an item matches; the parser has applied the others."""

_PLACES = {
    _constants.AT_BEGINNING: "^",
    _constants.AT_BEGINNING_STRING: r"\A",
    _constants.AT_BOUNDARY: r"\b",
    _constants.AT_NON_BOUNDARY: r"\B",
    _constants.AT_END: "$",
    _constants.AT_END_STRING: r"\Z",
}

_CATEGORIES = {
    _constants.CATEGORY_DIGIT: r"\d",
    _constants.CATEGORY_NOT_DIGIT: r"\D",
    _constants.CATEGORY_SPACE: r"\s",
    _constants.CATEGORY_NOT_SPACE: r"\S",
    _constants.CATEGORY_WORD: r"\w",
    _constants.CATEGORY_NOT_WORD: r"\W",
}

_Items: TypeAlias = Sequence[tuple[Any, Any]]
"""What the parser makes of an expression: operations and their arguments."""


class Pattern:
    r"""A regular expression; matching takes time linear in the text.

    Raises:
        ValueError: The expression cannot be read, is too large, or refers to groups; also of a
            match that takes more steps than are allowed.

    Examples:
        >>> Pattern(r"layer\.\d+").fullmatch("layer.12"), Pattern("(.|.|.)*!").fullmatch("encoder" * 100)
        (True, False)
    """

    def __init__(self, text: str) -> None:
        self._work = _Work()
        try:
            parsed = _parser.parse(text)
            self._automaton = _Automaton(parsed, parsed.state.flags, self._work)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def fullmatch(self, text: str) -> bool:
        """Whether the whole text matches."""
        return self._ends(text)[-1]

    def match(self, text: str) -> bool:
        """Whether the text begins with a match."""
        return any(self._ends(text))

    def _ends(self, text: str) -> Places:
        self._work.allowed += _MOST_VISITS * len(text)
        return self._automaton.ends(text)


@dataclass
class _Work:
    """What an expression took so far: its states, and visits of them when texts were matched."""

    states: int = 0
    visits: int = 0
    allowed: int = _FREE_VISITS

    def visit(self, states: int) -> None:
        self.visits += states
        if self.visits > self.allowed:
            raise ValueError("the regular expression takes too many steps; write a simpler one")


@dataclass
class _State:
    """A state: the next ones; before it enters them, an item that the next character, or the place, must match."""

    then: list[int] = field(default_factory=list)
    character: re.Pattern[str] | None = None
    condition: object = None  # key of a condition on the place
    never: bool = False


Places: TypeAlias = list[bool]
"""For each place in a text, from before its first to behind its last character."""


class _Automaton:
    """The states of an expression, or of a part of it that looks ahead or behind.

    ``backward`` reads texts from the end. Conditions on places are evaluated for all places of a
    text before it is read: what looks ahead is an automaton that reads backward and may begin
    anywhere, and the places where it accepts are those where a match begins.
    """

    def __init__(self, items: _Items, flags: int, work: _Work, *, backward: bool = False) -> None:
        self._work, self._backward = work, backward
        self._states = [_State()]  # the accepting one
        self._conditions: dict[object, Callable[[str], Places]] = {}
        self._known: dict[Any, frozenset[int]] = {}
        self._kept = 0
        self._start = self._sequence(items, flags, 0)

    # --- construction ---------------------------------------------------------------------------------------

    def _add(self, state: _State) -> int:
        self._work.states += 1
        if self._work.states > _MOST_STATES:
            raise ValueError("the regular expression is too large")
        self._states.append(state)
        return len(self._states) - 1

    def _sequence(self, items: _Items, flags: int, then: int) -> int:
        """Add the states of items one after the other, which lead to a state; the first one."""
        for item in items if self._backward else reversed(list(items)):
            then = self._item(*item, flags, then)
        return then

    def _item(self, operation: Any, argument: Any, flags: int, then: int) -> int:
        if operation is _constants.BRANCH:
            return self._add(_State([self._sequence(each, flags, then) for each in argument[1]]))
        if operation is _constants.SUBPATTERN:
            _, added, removed, inner = argument
            return self._sequence(inner, (flags | added) & ~removed, then)
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, repeated = argument
            return self._repeat(least, most, repeated, flags, then)
        if operation is _constants.AT:
            source, own = _PLACES[argument], flags & _OWN_FLAGS
            self._conditions.setdefault((source, own), _at(source, own))
            return self._add(_State([then], condition=(source, own)))
        if operation in (_constants.ASSERT, _constants.ASSERT_NOT):
            direction, inner = argument
            looks = _Automaton(inner, flags, self._work, backward=direction > 0)
            self._conditions[looks] = _looking(looks, wanted=operation is _constants.ASSERT)
            return self._add(_State([then], condition=looks))
        if operation is _constants.FAILURE:
            return self._add(_State(never=True))
        one_character = _source(operation, argument)
        if one_character is None:
            raise ValueError(
                f"the regular expression has {str(operation).lower()}, which takes no bounded time"
            )
        return self._add(_State([then], character=re.compile(one_character, flags & _OWN_FLAGS)))

    def _repeat(self, least: Any, most: Any, items: _Items, flags: int, then: int) -> int:
        if most is _constants.MAXREPEAT:
            loop = self._add(_State([then]))
            self._states[loop].then.append(self._sequence(items, flags, loop))
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(_State([end, self._sequence(items, flags, then)]))
        for _ in range(least):
            behind, then = then, self._sequence(items, flags, then)
            if then == behind:  # no state was added: nothing is matched, however often
                break
        return then

    # --- matching -------------------------------------------------------------------------------------------

    def ends(self, text: str, *, anywhere: bool = False) -> Places:
        """For each place, whether a match ends there that begins at the first place, or ``anywhere``.

        Read backward, the first place is the last one, and a match ends where it begins.
        """
        self._work.visit(_VISITS_OF_A_CONDITION * len(self._conditions) * len(text))
        conditions = {key: condition(text) for key, condition in self._conditions.items()}
        places = range(len(text), -1, -1) if self._backward else range(len(text) + 1)
        found = [False] * (len(text) + 1)
        states: frozenset[int] = frozenset()
        start = frozenset([self._start])
        for place in places:
            if anywhere or place == places[0]:
                states |= start
            holding = (
                frozenset([key for key, holds in conditions.items() if holds[place]])
                if conditions
                else _NONE
            )
            states = self._closed(states, holding)
            found[place] = 0 in states
            if place != places[-1]:
                states = self._after(states, text[place - 1 if self._backward else place])
            if not states and not anywhere:
                break
        return found

    def _closed(self, states: frozenset[int], holds: frozenset[object]) -> frozenset[int]:
        """The states that can be entered from some without a character; ``holds``: the conditions of the place."""
        known = self._known.get((states, holds))
        if known is not None:
            return known
        closed, waiting = set[int](), list(states)
        while waiting:
            number = waiting.pop()
            state = self._states[number]
            if number in closed:
                continue
            closed.add(number)
            if (
                state.character is None
                and not state.never
                and (state.condition is None or state.condition in holds)
            ):
                waiting += state.then
        return self._keep((states, holds), frozenset(closed), len(closed))

    def _after(self, states: frozenset[int], character: str) -> frozenset[int]:
        """The states that a character leads to."""
        known = self._known.get((states, character))
        if known is not None:
            return known
        entered = set[int]()
        for number in states:
            state = self._states[number]
            if state.character is not None and state.character.fullmatch(character):
                entered.update(state.then)
        return self._keep((states, character), frozenset(entered), len(states))

    def _keep(self, key: Any, states: frozenset[int], visits: int) -> frozenset[int]:
        """Keep a step for other places and texts; a ``ValueError`` after too many visits of states."""
        self._work.visit(visits)
        self._kept += len(states) + 1
        if self._kept > _MOST_KEPT:
            self._known.clear()
            self._kept = 0
        self._known[key] = states
        return states


def _at(source: str, flags: int) -> Callable[[str], Places]:
    regex = re.compile(source, flags)
    return lambda text: [regex.match(text, place) is not None for place in range(len(text) + 1)]


def _looking(automaton: _Automaton, *, wanted: bool) -> Callable[[str], Places]:
    return lambda text: [found == wanted for found in automaton.ends(text, anywhere=True)]


def _source(operation: Any, argument: Any) -> str | None:
    """An item that matches one character, as an expression of its own; None if it is none."""
    if operation is _constants.ANY:
        return "."
    if operation is _constants.LITERAL:
        return re.escape(chr(argument))
    if operation is _constants.NOT_LITERAL:
        return f"[^{re.escape(chr(argument))}]"
    if operation is _constants.IN:
        return f"[{''.join(_in_class(argument))}]"
    return None


def _in_class(items: _Items) -> Iterator[str]:
    for operation, argument in items:
        if operation is _constants.NEGATE:
            yield "^"
        elif operation is _constants.LITERAL:
            yield re.escape(chr(argument))
        elif operation is _constants.RANGE:
            yield "-".join(re.escape(chr(end)) for end in argument)
        else:
            yield _CATEGORIES[argument]
