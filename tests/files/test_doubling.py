"""Small files whose functions stand for a graph that nothing can hold: counted, and refused before any work."""

import tracemalloc

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import htp_export
from htp_export.command.main import main
from htp_export.editing.flattening import read_flat
from htp_export.errors import FileError, InputError
from htp_export.files import parsing
from htp_export.files.parsing import flat_size
from tests.all_commands import COMMANDS, arguments

NODES = 2**39  # of 40 functions


def calling(functions: dict[str, list[str]], called: str, domain: str = "net") -> onnx.ModelProto:
    """A model with functions that are chains of nodes: calls of other functions, or operators."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]

    def chain(names: list[str], first: str, last: str) -> list[onnx.NodeProto]:
        values = [first, *(f"v{place}" for place in range(len(names) - 1)), last]
        return [
            helper.make_node(
                name, [a], [b], f"{name}_{b}", domain=domain if name in functions else ""
            )
            for name, a, b in zip(names, values, values[1:], strict=False)
        ]

    made = [
        helper.make_function(domain, each, ["a"], ["b"], chain(of, "a", "b"), opsets)
        for each, of in functions.items()
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph(chain([called], "x", "y"), "net", ends[:1], ends[1:])
    return helper.make_model(graph, functions=made, opset_imports=opsets, ir_version=10)


def doubling(count: int, domain: str = "net") -> onnx.ModelProto:
    """Functions of which each calls the one before it twice."""
    functions = {"f0": ["Relu"], **{f"f{k}": [f"f{k - 1}"] * 2 for k in range(1, count)}}
    return calling(functions, f"f{count - 1}", domain)


@pytest.mark.parametrize("domain", ["net", "htp"])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_count_is_that_of_the_flat_graph(count, domain):
    model = doubling(count, domain)
    assert (
        flat_size(ir.from_proto(model)) == 2 ** (count - 1) == htp_export.inline(model).nodes_after
    )


def test_calls_in_branches_count():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "f" : 1]>
        g (float x, bool c) => (float y) {
            y = If (c) <
                then_branch = t () => (float p) { p = f.two (x) }, else_branch = e () => (float q) { q = Abs (x) }
            >
        }
        <domain: "f", opset_import: ["" : 20]> two (a) => (d) { b = Relu (a) d = Relu (b) }""")
    assert flat_size(ir.from_proto(model)) == 4 == htp_export.inline(model).nodes_after


def test_a_chain_of_many_functions_is_counted():
    functions = {f"f{k}": [f"f{k - 1}", "Relu"] if k else ["Relu"] for k in range(5000)}
    assert flat_size(ir.from_proto(calling(functions, "f4999"))) == 5000


@pytest.mark.parametrize("domain", ["net", "htp"])
def test_a_file_is_refused_when_it_is_read(domain, tmp_path):
    file = tmp_path / "bomb.onnx"
    onnx.save(doubling(40, domain), file)
    assert file.stat().st_size < 4000
    tracemalloc.start()
    try:
        with pytest.raises(FileError) as caught:
            htp_export.load(file)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert f"bomb.onnx: model 'net' has {NODES:,} nodes after inlining its functions" in str(
        caught.value
    )
    assert "at most 1,000,000" in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        name
        for name, words in COMMANDS.items()
        if not {*words.split()} & {"PART", "STEPS", "ADAPTER"}
    ],
)
def test_every_command_refuses_it(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(doubling(40), "bomb.onnx")
    assert main(arguments(command, {"FILE": "bomb.onnx"})) == 2
    assert f"{NODES:,} nodes" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.onnx"]


@pytest.mark.parametrize("domain", ["net", "htp"])
def test_a_model_in_memory_is_refused_too(domain):
    model = ir.from_proto(doubling(40, domain))
    for work in (
        htp_export.load,
        htp_export.inline,
        read_flat,
        lambda model: htp_export.functions(model, "**"),
    ):
        with pytest.raises(InputError, match=f"{NODES:,} nodes"):
            work(model)


def test_numbers_of_any_length_are_not_computed():
    with pytest.raises(InputError, match="more than 1,000,000,000,000,000 nodes"):
        htp_export.load(doubling(3000))


def test_functions_that_call_one_another_in_a_circle_are_refused():
    functions = {f"f{k}": [f"f{(k - 1) % 40}"] * 2 for k in range(40)}
    with pytest.raises(InputError, match="calls itself"):
        htp_export.load(calling(functions, "f39"))
    with pytest.raises(InputError, match="'f0' calls itself"):
        htp_export.load(calling({"f0": ["f0", "Relu"]}, "f0"))


def test_what_a_file_holds_anyway_is_not_refused(monkeypatch):
    monkeypatch.setattr(parsing, "MOST_FLAT_NODES", 4)
    assert htp_export.inline(doubling(3)).nodes_after == 4
    with pytest.raises(InputError, match="16 nodes"):
        htp_export.inline(doubling(5))
    assert htp_export.inline(calling({"f0": ["Relu"] * 9}, "f0")).nodes_after == 9
