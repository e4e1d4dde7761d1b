"""Limits of the work on models: just inside of each the work is done, and just outside it ends as documented."""

import re

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.verify import locating, same_model
from htp_export.errors import InputError
from htp_export.format import call_tree
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.shapes import sizes
from htp_export.shapes.inference import _MOST_TRIPS
from htp_export.shapes.operators import sums
from htp_export.shapes.symbolic import Symbolic

HEADER = '<ir_version: 10, opset_import: ["": 20, "my.own": 1]>'


def model(text: str) -> ir.Model:
    return ir.from_onnx_text(f"{HEADER} {text}")


def inferred(model: ir.Model) -> tuple[Symbolic, dict[str | None, ir.Value]]:
    symbolic = Symbolic(model.graph, functions=model.functions)
    return symbolic, {value.name: value for node in model.graph for value in node.outputs}


# --- shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trips", "size"), [(_MOST_TRIPS - 1, 2**31 - 1), (_MOST_TRIPS, None)])
def test_a_loop_without_an_end_of_its_own_has_results_of_unknown_size(trips, size):
    loop = model(f"""g (float x) => (float[n] y) <int64 trips = {{{trips}}}> {{
        y = Loop (trips) <body = b (int64 i, bool on) => (bool go, float[3] z) {{
            go = Constant <value = bool {{1}}> () z = Constant <value = float[3] {{1, 2, 3}}> () }}> }}""")
    symbolic, values = inferred(loop)
    shape = symbolic.shape(values["y"])
    assert shape is not None
    assert (shape[0] if isinstance(shape[0], int) else None) == size


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_open_size_is_multiplied_by_a_factor_that_is_exact(beyond):
    factor = 1 + 1 / (sums._LARGEST_DENOMINATOR << beyond)
    resize = model(f"""g (float[1, 3, n, m] x) => (y) <float[4] factors = {{1, 1, {factor!r}, 1}}> {{
        y = Resize (x, , factors) }}""")
    symbolic, values = inferred(resize)
    shape = symbolic.shape(values["y"])
    assert shape is not None
    assert str(shape[2]) == "(65*n)//64" if not beyond else sizes.is_unnamed(shape[2])


# --- calls ----------------------------------------------------------------------------------------------


def test_calls_that_a_file_claims_are_listed_up_to_a_number(monkeypatch):
    tree = Hierarchy([ModuleInfo("", "Net", 1), ModuleInfo("fc", "Fc", 4)])
    for most, listed in ((4, (0, 1, 2, 3)), (3, (0, 1, 2))):
        monkeypatch.setattr(call_tree, "MOST_CALLS", most)
        assert CallTree(tree).numbers("fc", Instance("")) == listed
        assert [call.call for call in CallTree(tree).work(("fc",)).calls] == [*listed]


# --- comparison -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("growth", "origins"), [(1.01, {"own", "grown"}), (0.99, {"own"})])
def test_an_error_that_grows_little_is_no_origin_if_another_is_sudden(growth, origins):
    """``grown`` is computed from a tensor that is just within its tolerance, ``own`` from one that is exact."""
    chain = model(
        "g (float[2] x, float[2] z) => (float[2] grown, float[2] own) "
        "{ within = Relu (x) grown = Neg (within) own = Exp (z) }"
    )
    tagged = htp_export.load(chain)
    within = 0.9
    excess = {"within": within, "grown": growth * locating._SUDDEN * within, "own": 50.0, "z": 0.0}
    found = locating._origins(tagged, {tagged.values[name]: size for name, size in excess.items()})
    assert {value.name for value in found} == origins


@pytest.mark.parametrize("changed", [same_model._FEWEST - 1, same_model._FEWEST])
def test_other_values_in_a_few_parameters_are_a_fault_and_in_more_another_model(tmp_path, changed):
    import torch

    torch.manual_seed(0)
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    htp_export.export(net, (x,), tmp_path / "net.onnx", verbose=False)
    with torch.no_grad():
        for parameter in list(net.parameters())[:changed]:
            parameter += 1.0
    if changed < same_model._FEWEST:
        assert not htp_export.verify(net, tmp_path / "net.onnx", (x,)).ok
        return
    with pytest.raises(InputError, match=re.escape("3 of 4 parameters have other values")):
        htp_export.verify(net, tmp_path / "net.onnx", (x,))


@pytest.mark.parametrize("beyond", [0, 1])
def test_parameters_are_told_apart_by_their_first_values(beyond):
    values = np.zeros((2, same_model._SAMPLE + 1), np.float32)
    other = values.copy()
    other[0, same_model._SAMPLE - 1 + beyond] = 1.0
    assert np.array_equal(same_model._sample(values), same_model._sample(other)) == bool(beyond)
