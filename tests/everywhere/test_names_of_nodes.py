"""A name of a node or tensor in the place of a module: every command says whose it is."""

import pytest

import htp_export
from htp_export.command.main import main
from tests.all_commands import companions, example
from tests.nets import EXPORTERS

COMMANDS = [
    "tree FILE --select NODE", "nodes FILE --select NODE", "cost FILE --select NODE",
    "profile FILE --budget NODE=5ms", "verify FILE --entry tests.all_commands:example --select NODE",
    "compare FILE FILE --select NODE", "extract FILE NODE -o out.onnx", "splice FILE NODE PART -o out.onnx",
    "functions FILE NODE -o out.onnx", "tap FILE NODE -o out.onnx", "tap FILE NODE:out -o out.onnx",
    "steer FILE NODE:in -o out.onnx", "partition FILE NODE -o stages", "place FILE --rule NODE=cpu -o out.onnx",
    "quantize FILE --rule NODE=int8-dynamic -o out.onnx", "prune FILE --rule NODE=0.5 -o out.onnx",
    "sensitivity FILE --precision int8 --select NODE", "search FILE --choices int8 --trials 2 --select NODE",
    "lora insert FILE NODE -o out.onnx", "forensics FILE --select NODE",
]  # fmt: skip


@pytest.fixture(scope="module", params=EXPORTERS)
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    model, inputs = example()
    file = folder / "net.onnx"
    htp_export.export(model, inputs, file, dynamo=request.param == "dynamo", verbose=False)
    return {"FILE": str(file), **companions(folder)}


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_node_in_the_place_of_a_module_is_told_with_its_module(
    command, files, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    [node] = [node for node in htp_export.nodes(files["FILE"]) if "act" in node.modules]
    typed = [files.get(word, word.replace("NODE", node.name)) for word in command.split()]
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert f"{node.name!r}" in error
    assert "it is a node (Relu) of module 'act'" in error
    assert not list(tmp_path.iterdir())


def test_tensors_parameters_inputs_and_initializers_are_told_too(files, tmp_path):
    tagged = htp_export.load(files["FILE"])
    [node] = tagged["act"].nodes
    named = {
        str(node.outputs[0].name): "a tensor that module 'act' computes",
        "first.weight": "a parameter of module 'first'",
        str(tagged.model.graph.inputs[0].name): "an input of the model",
    }
    for name, described in named.items():
        with pytest.raises(htp_export.InputError) as raised:
            tagged.select(name)
        assert f"matches no module; it is {described}" in str(raised.value)
    with pytest.raises(htp_export.InputError, match="nearest: 'first'"):
        tagged.select("frist")


def test_owners_are_found_by_the_name_of_a_node_or_of_a_tensor(files):
    tagged = htp_export.load(files["FILE"])
    for node in tagged.nodes:
        owners = tagged.owners_of(node)
        assert tagged.owners_of(str(node.name)) == owners
        assert {tagged.owners_of(str(value.name)) for value in node.outputs} == {owners}
    with pytest.raises(htp_export.InputError, match="is an input of the model"):
        tagged.owners_of(str(tagged.model.graph.inputs[0].name))
    weight = next(iter(tagged.model.graph.initializers))
    with pytest.raises(htp_export.InputError, match="no node computes it; it is read by"):
        tagged.owners_of(weight)
    with pytest.raises(htp_export.InputError, match="no node and no tensor 'y'"):
        tagged.owners_of("y")
