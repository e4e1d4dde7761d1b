"""Regular expressions from untrusted files, matched in time linear in the length of the text.

``re`` backtracks, which takes exponential time for some expressions of a few characters, such as
``(.|.)*!``. Selectors in the steps of a model file and patterns in the config of an adapter are not
trusted. They are matched here by a simulated nondeterministic automaton (Thompson, "Regular
expression search algorithm", 1968; https://swtch.com/~rsc/regexp/regexp1.html).

The syntax is that of ``re``, which parses it, without constructs that are not regular: references
to groups, atomic groups and possessive repeats (``(?>...)``, ``a*+``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined] # the parser of `re`, which has no public name
from typing import Any, TypeAlias

_MOST_STATES = 50_000
"""States of an automaton: an expression needs about one for each letter, and copies of repeated parts."""

_FREE_VISITS, _MOST_VISITS = 1_000_000, 50
"""Allowed visits of states: half a second at first, and this number for each character of the texts.

A visit takes half a microsecond. Transitions are cached, and then visit no states; expressions that
people write have a few distinct transitions.
"""

_VISITS_OF_A_CONDITION = 4
"""The cost of evaluating one condition at one position, in visits."""

_NONE: frozenset[object] = frozenset()

_MOST_KEPT = 200_000
"""States in cached transitions: some 10 MB of memory."""

_OWN_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.ASCII
"""Flags for matching one character; the parser has already applied the other flags."""

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
"""A parsed expression: operations and their arguments."""


class Pattern:
    r"""A regular expression; matching takes time linear in the text.

    Raises:
        ValueError: The expression is invalid, too large, or not regular. Also raised by a match
            that exceeds the allowed number of visited states.

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
        """Return whether the whole text matches."""
        return self._ends(text)[-1]

    def match(self, text: str) -> bool:
        """Return whether the text begins with a match."""
        return any(self._ends(text))

    def _ends(self, text: str) -> Places:
        self._work.allowed += _MOST_VISITS * len(text)
        return self._automaton.ends(text)


@dataclass
class _Work:
    """The cost of an expression so far: its states, and their visits when texts were matched."""

    states: int = 0
    visits: int = 0
    allowed: int = _FREE_VISITS

    def visit(self, states: int) -> None:
        self.visits += states
        if self.visits > self.allowed:
            raise ValueError("the regular expression needs too many steps; write a simpler one")


@dataclass
class _State:
    """A state, and the requirement for a transition to the next states ``then``.

    ``character``: the next character must match it. ``condition``: the key of a condition on the
    position. ``never``: there is no transition.
    """

    then: list[int] = field(default_factory=list)
    character: re.Pattern[str] | None = None
    condition: object = None
    never: bool = False


Places: TypeAlias = list[bool]
"""One value for each position in a text: before each character, and after the last one."""


class _Automaton:
    """The automaton of an expression, or of a lookahead or lookbehind assertion in it.

    ``backward`` reads texts from the end. Conditions are evaluated for all positions of a text
    before it is read: a lookahead is an automaton that reads backward and may start anywhere; it
    accepts at the positions where a match begins.
    """

    def __init__(self, items: _Items, flags: int, work: _Work, *, backward: bool = False) -> None:
        self._work, self._backward = work, backward
        self._states = [_State()]  # number 0 is the accepting state
        self._conditions: dict[object, Callable[[str], Places]] = {}
        self._transitions: dict[Any, frozenset[int]] = {}  # a cache
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
        """Add the states of a sequence of items, followed by the state ``then``; return the first state."""
        for item in items if self._backward else reversed(list(items)):
            then = self._item(*item, flags, then)
        return then

    # One case for each operation of the parser: more than 15 branches, but no nesting.
    def _item(self, operation: Any, argument: Any, flags: int, then: int) -> int:
        """Add the states of one item, followed by the state ``then``; return the first state."""
        if operation is _constants.BRANCH:
            branches = [self._sequence(branch, flags, then) for branch in argument[1]]
            return self._add(_State(branches))
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
            automaton = _Automaton(inner, flags, self._work, backward=direction > 0)
            expected = operation is _constants.ASSERT
            self._conditions[automaton] = _looking(automaton, expected=expected)
            return self._add(_State([then], condition=automaton))
        if operation is _constants.FAILURE:
            return self._add(_State(never=True))
        one_character = _source(operation, argument)
        if one_character is None:
            raise ValueError(
                f"the regular expression contains {str(operation).lower()}, which is not supported: "
                "it cannot be matched in linear time"
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
            following = then
            then = self._sequence(items, flags, following)
            if then == following:  # no state was added: the items match the empty text
                break
        return then

    # --- matching -------------------------------------------------------------------------------------------

    def ends(self, text: str, *, anywhere: bool = False) -> Places:
        """Return for each position whether a match ends there that starts at the first position, or ``anywhere``.

        If texts are read backward, the first position is the end of the text, and the result is
        where matches begin.
        """
        self._work.visit(_VISITS_OF_A_CONDITION * len(self._conditions) * len(text))
        conditions = {key: condition(text) for key, condition in self._conditions.items()}
        positions = range(len(text), -1, -1) if self._backward else range(len(text) + 1)
        accepts = [False] * (len(text) + 1)
        states: frozenset[int] = frozenset()
        start = frozenset([self._start])
        for position in positions:
            if anywhere or position == positions[0]:
                states |= start
            satisfied = _NONE
            if conditions:
                satisfied = frozenset([key for key, holds in conditions.items() if holds[position]])
            states = self._closed(states, satisfied)
            accepts[position] = 0 in states
            if position != positions[-1]:
                states = self._after(states, text[position - 1 if self._backward else position])
            if not states and not anywhere:
                break
        return accepts

    def _closed(self, states: frozenset[int], satisfied: frozenset[object]) -> frozenset[int]:
        """Return the states that can be reached without a character, if these conditions are satisfied."""
        known = self._transitions.get((states, satisfied))
        if known is not None:
            return known
        closed, pending = set[int](), list(states)
        while pending:
            number = pending.pop()
            state = self._states[number]
            if number in closed:
                continue
            closed.add(number)
            if state.character is not None or state.never:
                continue
            if state.condition is None or state.condition in satisfied:
                pending += state.then
        return self._keep((states, satisfied), frozenset(closed), len(closed))

    def _after(self, states: frozenset[int], character: str) -> frozenset[int]:
        """Return the states after a character."""
        known = self._transitions.get((states, character))
        if known is not None:
            return known
        entered = set[int]()
        for number in states:
            state = self._states[number]
            if state.character is not None and state.character.fullmatch(character):
                entered.update(state.then)
        return self._keep((states, character), frozenset(entered), len(states))

    def _keep(self, key: Any, states: frozenset[int], visits: int) -> frozenset[int]:
        """Cache a transition; a ``ValueError`` after too many visits of states."""
        self._work.visit(visits)
        self._kept += len(states) + 1
        if self._kept > _MOST_KEPT:
            self._transitions.clear()
            self._kept = 0
        self._transitions[key] = states
        return states


def _at(source: str, flags: int) -> Callable[[str], Places]:
    """Return the condition of an anchor, such as ``$``."""
    regex = re.compile(source, flags)
    return lambda text: [regex.match(text, start) is not None for start in range(len(text) + 1)]


def _looking(automaton: _Automaton, *, expected: bool) -> Callable[[str], Places]:
    """Return the condition of a lookahead or lookbehind; ``expected``: whether it must match."""
    return lambda text: [accepts == expected for accepts in automaton.ends(text, anywhere=True)]


def _source(operation: Any, argument: Any) -> str | None:
    """Return an expression for an item that matches one character; None for another item."""
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
    """Yield the source of the items of a character class."""
    for operation, argument in items:
        if operation is _constants.NEGATE:
            yield "^"
        elif operation is _constants.LITERAL:
            yield re.escape(chr(argument))
        elif operation is _constants.RANGE:
            yield "-".join(re.escape(chr(end)) for end in argument)
        else:
            yield _CATEGORIES[argument]
