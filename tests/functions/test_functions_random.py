"""Functions of random graphs with random owners: always a valid model that computes the same, and comes back."""

import random

import numpy as np
import pytest

import htp_export
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from tests import handmade
from tests.functions.test_functions import assert_same
from tests.handmade import tagged_node, value

PATHS = ("", "a", "a.x", "a.x.p", "a.y", "b", "b.x", "b.y", "c")


def random_model(seed):
    """Nodes of modules that take turns, of several modules, of unknown calls, and of none."""
    pick = random.Random(seed)
    calls = {path: 2 if path in ("a.y", "b", "c") and pick.random() < 0.3 else 1 for path in PATHS}
    if calls["b"] == 2:
        calls |= {path: pick.choice((1, 2, 4)) for path in ("b.x", "b.y")}
    x, nodes, running = value("x"), [], "a"
    tensors = [x]
    for number in range(pick.choice((5, 12, 30, 60))):
        running = pick.choice(PATHS) if pick.random() < 0.35 else running
        owners = [running] if pick.random() < 0.85 else pick.sample(PATHS[1:], 2)
        several = len(owners) == 1 and calls[running] > 1
        call = pick.randrange(calls[running]) if several and pick.random() < 0.9 else None
        read = [pick.choice(tensors[-6:] if pick.random() < 0.8 else tensors) for _ in range(2)]
        node = tagged_node("Add", read, owners if len(owners) > 1 else running, f"v{number}", call)
        if len(owners) > 1:
            node.metadata_props[tags.MODULE] = tags.common_ancestor(owners)
            node.metadata_props[tags.REASON] = pick.choice(("shared", "fused", "scope"))
        if pick.random() < 0.05:
            node.metadata_props.clear()
        nodes.append(node)
        tensors.append(node.outputs[0])
    modules = [
        ModuleInfo(path, f"net.{path[-1:].upper() or 'Net'}", calls[path], "computed")
        for path in PATHS
    ]
    return handmade.model([x], nodes, [], modules)


@pytest.mark.parametrize("seed", range(40))
def test_random_graph_computes_the_same_and_comes_back(seed):
    model = random_model(seed)
    try:
        nested = htp_export.functions(model, "**")
    except htp_export.InputError as error:
        assert "no selected module can be a function" in str(error)  # noqa: PT017 - it may also go well
        return
    x = np.float32(np.random.default_rng(seed).normal(size=(2, 4)) * 1e-3)
    assert_same(nested, model, [x])
