"""Searches over what items depend on: `reached` and `dependencies_first`."""

import random

import pytest

from htp_export.model.neighbours import dependencies_first, reached


def drawn(seed: int, cyclic: bool) -> dict[int, list[int]]:
    """For each of 40 items, the items that it depends on."""
    generator = random.Random(seed)
    dependencies: dict[int, list[int]] = {}
    for item in range(40):
        others = range(40 if cyclic else item)
        dependencies[item] = generator.choices(others, k=generator.randrange(4)) if others else []
    return dependencies


def closure(starts: set[int], dependencies: dict[int, list[int]]) -> set[int]:
    """The items that can be reached, by repeated union until nothing is added."""
    found = set(starts)
    while True:
        more = found.union(*(dependencies[item] for item in found))
        if more == found:
            return found
        found = more


@pytest.mark.parametrize("seed", range(20))
def test_a_search_finds_each_item_once_also_in_cycles(seed):
    dependencies = drawn(seed, cyclic=True)
    found = list(reached([39, 20, 39], dependencies.__getitem__))
    assert len(found) == len(set(found))
    assert set(found) == closure({39, 20}, dependencies)


@pytest.mark.parametrize("seed", range(20))
def test_an_item_comes_after_all_that_it_depends_on(seed):
    dependencies = drawn(seed, cyclic=False)
    order = list(dependencies_first(39, dependencies.__getitem__))
    assert set(order) == closure({39}, dependencies)
    assert len(order) == len(set(order))
    place = {item: position for position, item in enumerate(order)}
    for item in order:
        assert all(place[other] < place[item] for other in dependencies[item])


def test_items_that_are_done_are_left_out_with_their_dependencies():
    dependencies = {"d": "bc", "c": "a", "b": "", "a": ""}
    assert list(dependencies_first("d", dependencies.__getitem__, {"c"})) == ["b", "d"]
    assert list(dependencies_first("d", dependencies.__getitem__, {"d"})) == []


def test_a_long_chain_needs_no_recursion():
    def before(item):
        return [item - 1] if item else []

    assert list(dependencies_first(100_000, before)) == [*range(100_001)]
    assert sum(1 for _ in reached([100_000], before)) == 100_001


def test_a_search_stops_where_its_caller_stops():
    asked = []

    def before(item):
        asked.append(item)
        return [item + 1]

    assert any(item == 3 for item in reached([0], before))  # the items have no end
    assert asked == [0, 1, 2]
