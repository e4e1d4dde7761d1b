"""``export_modules_as_functions`` of `export`: both exporters write modules as functions, and everything reads them."""

import io
import itertools
import json
import logging

import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError, SelectorError
from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.torchscript import TorchScriptCapture
from tests.exporting import every, exported, tiny_bert
from tests.functions.test_functions import function, op_types, same_file
from tests.handmade import stripped
from tests.nets import EXPORTERS, NETS, Holding, composed, spread


class Block(Holding, fc=torch.nn.Linear(4, 4), act=torch.nn.ReLU()):
    def forward(self, x):
        return x + self.act(self.fc(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(), Block(), Block())
        self.head = torch.nn.Linear(4, 2)
        self.dropout = torch.nn.Dropout()

    def forward(self, x):
        return self.dropout(self.head(self.blocks(x)))


def net():
    torch.manual_seed(0)
    return spread(Net()).eval()


X = torch.randn(2, 4)


def written(value, exporter, folder, model=None, **options):
    """The file of a small net."""
    file = folder / "model.onnx"
    dynamo = exporter == "dynamo"
    htp_export.export(
        model or net(),
        (X,),
        file,
        dynamo=dynamo,
        verbose=False,
        export_modules_as_functions=value,
        **options,
    )
    return onnx.load(file)


def bert():
    from transformers.models.bert.modeling_bert import BertLayer

    model, kwargs = tiny_bert(layers=2)
    return model, kwargs, BertLayer, "encoder.layer.{}"


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=100, use_cache=False,
    )  # fmt: skip
    return (
        spread(LlamaForCausalLM(config)).eval(),
        tiny_bert()[1],
        LlamaDecoderLayer,
        "model.layers.{}",
    )


class Exported:
    """A model, its file without functions, and the one with one function for its layers."""

    def __init__(self, make, exporter, folder):
        self.model, self.kwargs, self.layer, self._path = make()
        (folder / "flat").mkdir()
        (folder / "nested").mkdir()
        self.flat = exported(self.model, self.kwargs, exporter, folder / "flat")
        options = {"export_modules_as_functions": {self.layer}}
        self.nested = exported(self.model, self.kwargs, exporter, folder / "nested", **options)
        self.files = (folder / "flat" / "model.onnx", folder / "nested" / "model.onnx")

    @property
    def layers(self):
        return [self._path.format(number) for number in range(2)]


@pytest.fixture(
    scope="module",
    params=every(4, map(pytest.param, itertools.product((llama, bert), EXPORTERS))),
    ids=lambda pair: f"{pair[0].__name__}-{pair[1]}",
)
def decoder(request, tmp_path_factory):
    make, exporter = request.param
    return Exported(make, exporter, tmp_path_factory.mktemp(f"{make.__name__}-{exporter}"))


# --- what is written --------------------------------------------------------------------------------


@pytest.mark.long
def test_layers_are_calls_of_one_function_with_their_weights_as_inputs(decoder):
    model = ir.from_proto(decoder.nested)
    name = decoder.layer.__name__
    assert [made.name for made in model.functions.values()] == [name]
    calls = [node for node in model.graph if node.domain == "htp"]
    assert [call.name for call in calls] == decoder.layers
    formals = [given.name for given in function(model, name).inputs]
    assert formals[0] == "hidden_states"
    for call, path in zip(calls, decoder.layers, strict=True):
        given = {formal: value.name for formal, value in zip(formals, call.inputs, strict=True)}
        for formal, value in given.items():
            if value.startswith(path):
                assert value == f"{path}.{formal}"
    assert not function(model, name).graph.initializers


def test_without_functions_it_is_the_file_that_is_exported_without_them(decoder):
    assert same_file(htp_export.inline(decoder.nested).model, decoder.flat)


def test_every_module_agrees_with_pytorch(decoder):
    results = [
        htp_export.verify(decoder.model, file, kwargs=decoder.kwargs) for file in decoder.files
    ]
    assert all(result.ok for result in results)
    assert list(results[0].modules) == list(results[1].modules)
    assert results[1].modules[decoder.layers[1]].status == "agrees"


def test_trees_costs_and_optimised_graphs_are_those_of_the_flat_file(decoder):
    flat, nested = decoder.files
    assert htp_export.cost(nested).modules == htp_export.cost(flat).modules
    assert htp_export.load(nested).paths == htp_export.load(flat).paths
    found = htp_export.diff(flat, nested)
    assert (found.added, found.removed, found.changed) == ([], [], [])
    assert htp_export.fingerprint(nested).blocks == htp_export.fingerprint(flat).blocks
    assert same_file(htp_export.optimize(nested).model, htp_export.optimize(flat).model)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_true_is_every_module_that_computes(exporter, tmp_path):
    model = ir.from_proto(written(True, exporter, tmp_path))
    assert op_types(model.graph) == ["Sequential", "Linear"]
    assert op_types(function(model, "Sequential")) == ["Block", "Block", "Block"]
    assert op_types(function(model, "Block")) == ["Linear", "ReLU", "Add"]
    assert htp_export.verify(net(), tmp_path / "model.onnx", (X,)).score == "12 of 12"


@pytest.mark.parametrize(
    "value", [{Block}, [Block], Block, "class:Block", ["blocks.*"], (Block, "!head")], ids=repr
)
def test_modules_are_chosen_by_class_or_selector(value, tmp_path):
    model = ir.from_proto(written(value, "torchscript", tmp_path))
    assert op_types(model.graph) == ["Block", "Block", "Block", "Gemm"]
    assert [node.metadata_props["htp.module"] for node in model.graph] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]
    assert [made.name for made in model.functions.values()] == ["Block"]


@pytest.mark.parametrize("value", [False, None, set(), []])
def test_no_module_is_the_flat_file(value, tmp_path):
    model = ir.from_proto(written(value, "torchscript", tmp_path))
    assert op_types(model.graph) == ["Gemm", "Relu", "Add"] * 3 + ["Gemm"]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_module_of_a_model_without_any_is_the_flat_file(exporter, tmp_path):
    relu = torch.nn.ReLU().eval()
    assert op_types(ir.from_proto(written(True, exporter, tmp_path, relu)).graph) == ["Relu"]


# --- other tools ------------------------------------------------------------------------------------


def optimised_by_onnx_runtime(file):
    written_by_tool = file.with_name("ort.onnx")  # beside the weights
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(written_by_tool)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return onnx.load(written_by_tool)


def by_path(model):
    """Module path → the operators of its nodes, in the alphabet's order."""
    tagged = htp_export.load(model)
    return {path: sorted(op_types(tagged[path].nodes)) for path in tagged}


def test_tags_come_back_after_a_tool_inlined_the_functions_as_for_the_flat_file(decoder):
    results = [htp_export.carry(file, optimised_by_onnx_runtime(file)) for file in decoder.files]
    assert by_path(results[1].model) == by_path(results[0].model)
    verified = htp_export.verify(decoder.model, results[1].model, kwargs=decoder.kwargs)
    assert (verified.ok, verified.misplaced) == (True, ())


@pytest.mark.parametrize("select", ["**", pytest.param("class:*Attention", marks=pytest.mark.slow)])
def test_tags_come_back_after_functions_in_functions_were_inlined(decoder, select, tmp_path):
    for name in ("flat", "nested"):
        (tmp_path / name).mkdir()
    htp_export.load(decoder.files[0]).save(tmp_path / "flat" / "model.onnx")
    htp_export.functions(decoder.files[0], select, tmp_path / "nested" / "model.onnx")
    files = [tmp_path / name / "model.onnx" for name in ("flat", "nested")]
    results = [htp_export.carry(file, optimised_by_onnx_runtime(file)) for file in files]
    assert by_path(results[1].model) == by_path(results[0].model)


def test_tags_come_back_after_onnx_inlined_the_functions(decoder):
    inlined = onnx.inliner.inline_local_functions(decoder.nested)
    result = htp_export.carry(decoder.files[1], inlined)
    assert by_path(result.model) == by_path(decoder.flat)
    assert htp_export.verify(decoder.model, result.model, kwargs=decoder.kwargs).ok


def test_map_of_a_file_with_functions_is_that_of_the_flat_graph(decoder):
    mapped = htp_export.embed_map(decoder.files[1])
    text = mapped.metadata_props["htp.map"]
    assert text == htp_export.embed_map(decoder.files[0]).metadata_props["htp.map"]
    assert by_path(htp_export.carry(stripped(mapped)).model) == by_path(decoder.flat)


def test_tool_works_on_the_flat_graph(decoder):
    results = [htp_export.tools.onnxruntime(file, level="basic") for file in decoder.files]
    assert same_file(results[1].model, results[0].model)


def test_functions_that_a_tool_left_stay_functions(decoder):
    result = htp_export.carry(decoder.files[1], stripped(ir.from_proto(decoder.nested)))
    assert [made.name for made in result.model.functions.values()] == [decoder.layer.__name__]
    assert htp_export.verify(decoder.model, result.model, kwargs=decoder.kwargs).ok
    assert by_path(htp_export.inline(result.model).model) == by_path(decoder.flat)


def test_tags_of_a_flat_file_come_to_one_whose_modules_became_functions(decoder):
    result = htp_export.carry(decoder.flat, stripped(ir.from_proto(decoder.nested)))
    assert not result.model.functions
    assert by_path(result.model) == by_path(decoder.flat)


# --- programs, streams, folders ---------------------------------------------------------------------


def test_program_has_the_functions_and_runs():
    model = net()
    program = htp_export.export(model, (X,), verbose=False, export_modules_as_functions={Block})
    assert op_types(program.model.graph) == ["Block", "Block", "Block", "Gemm"]
    torch.testing.assert_close(program(X)[0], model(X))
    assert len(program.model_proto.functions) == 1


def test_weights_in_a_file_of_their_own_stay_there(tmp_path):
    nested = written({Block}, "dynamo", tmp_path, external_data=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert len(nested.graph.initializer) == 8


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore:Saving ONNX model to a BytesIO object is deprecated")
def test_stream_gets_the_functions(dynamo):
    stream = io.BytesIO()
    htp_export.export(
        net(), (X,), stream, dynamo=dynamo, verbose=False, export_modules_as_functions={Block}
    )
    assert [made.name for made in onnx.load_model_from_string(stream.getvalue()).functions] == [
        "Block"
    ]


def test_modules_of_an_exported_program_are_those_in_its_graph(tmp_path):
    program = torch.export.export(net(), (X,))
    model = ir.from_proto(written({Block}, "dynamo", tmp_path, program))
    assert op_types(model.graph) == ["Block", "Block", "Block", "Gemm"]
    with pytest.raises(
        InputError, match=r"no module has the class 'torch\.nn\.modules\.conv\.Conv2d'"
    ):
        written({torch.nn.Conv2d}, "dynamo", tmp_path, program)


def test_scripted_modules_are_known_by_the_class_that_was_scripted(tmp_path):
    model = ir.from_proto(written({Block}, "torchscript", tmp_path, torch.jit.script(net())))
    assert op_types(model.graph) == ["Block", "Block", "Block", "Gemm"]


@pytest.mark.parametrize(
    "options", [{"export_params": False}, {"opset_version": 13}, {"do_constant_folding": False}]
)
def test_options_of_torchscript_apply(options, tmp_path):
    nested = written({Block}, "torchscript", tmp_path, **options)
    assert [made.name for made in nested.functions] == ["Block"]
    assert nested.opset_import[0].version == options.get(
        "opset_version", nested.opset_import[0].version
    )
    assert len(nested.graph.input) == (9 if "export_params" in options else 1)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_only_the_file_is_left_in_the_folder_and_a_failure_leaves_what_was_there(
    exporter, tmp_path
):
    written({Block}, exporter, tmp_path)
    listed = sorted(tmp_path.iterdir())
    assert [file.name for file in listed] == ["model.onnx", "model.onnx.data"][
        : 2 if exporter == "dynamo" else 1
    ]
    before = (tmp_path / "model.onnx").read_bytes()
    with pytest.raises(
        InputError, match="no selected module can be a function: dropout: it gives back"
    ):
        written("dropout", exporter, tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == before
    assert sorted(tmp_path.iterdir()) == listed


@pytest.mark.filterwarnings("ignore::htp_export.errors.UntaggedExportWarning")
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_export_that_cannot_be_tagged_is_written_flat_where_that_is_allowed(
    exporter, tmp_path, monkeypatch, caplog
):
    def fail(*_):
        raise RuntimeError("a fault of ours")

    for capture in (DynamoCapture, TorchScriptCapture):
        monkeypatch.setattr(capture, "finish", fail)
    with caplog.at_level(logging.WARNING, "htp_export"), htp_export.tagging(strict=False):
        model = written({Block}, exporter, tmp_path)
    assert not model.functions
    assert "no module is a function: the model was exported without module tags" in caplog.text
    with pytest.raises(htp_export.errors.CaptureError, match="a fault of ours"):
        written({Block}, exporter, tmp_path)


def test_wanted_module_that_stays_flat_is_logged(tmp_path, caplog):
    model, kwargs = NETS["equal_siblings"].build()
    model = torch.nn.Sequential(model, torch.nn.Tanh()).eval()
    with caplog.at_level(
        logging.WARNING, "htp_export.capabilities.functions.provides_module_functions"
    ):
        htp_export.export(
            model,
            tuple(kwargs.values()),
            verbose=False,
            export_modules_as_functions=["0.first", "class:Tanh"],
        )
    assert "'0.first' is no function: all its nodes are shared with other modules" in caplog.text


@pytest.mark.parametrize("wanted", [True, ["head", "class:LSTM", "class:GRU"]])
def test_modules_that_the_exporter_merged_are_logged_as_no_functions(wanted, caplog):
    layers = {
        "lstm": torch.nn.LSTM(4, 4, batch_first=True),
        "gru": torch.nn.GRU(4, 4, batch_first=True),
    }
    model = composed(
        lambda self, x: self.head(self.gru(self.lstm(x)[0])[0]),
        **layers,
        head=torch.nn.Linear(4, 2),
    )
    with caplog.at_level(
        logging.WARNING, "htp_export.capabilities.functions.provides_module_functions"
    ):
        htp_export.export(
            model.eval(), (torch.randn(2, 3, 4),), verbose=False, export_modules_as_functions=wanted
        )
    assert "'lstm' is no function: it is merged with 'gru'" in caplog.text


# --- wrong values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (
            {torch.nn.Conv2d},
            InputError,
            r"no module has the class 'torch\.nn\.modules\.conv\.Conv2d'; nearest: ",
        ),
        ({torch.nn.LazyLinear}, InputError, "nearest: 'Linear'"),
        ("class:Blok", SelectorError, "matches no module; nearest: 'Block'"),
        ("block.*", SelectorError, "matches no module; nearest: 'blocks"),
        (3, InputError, "=3: it takes True, classes of modules, or a selector"),
        ({int}, InputError, "=<class 'int'>: it takes True"),
        ([Block()], InputError, "=Block: it takes True"),
        (torch.nn.ModuleDict({"a": Block()}), InputError, "=ModuleDict: it takes True"),
    ],
    ids=str,
)
def test_wrong_value_is_refused_before_the_model_runs(value, error, said, tmp_path):
    model = net()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(error, match=said):
        written(value, "dynamo", tmp_path, model)
    assert list(tmp_path.iterdir()) == []


# --- on the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"]
)
def test_command_writes_functions_and_shows_the_tree_of_the_flat_graph(exporter, tmp_path, capsys):
    command = ["export", "--entry", "tests.functions.test_export_functions:entry", f"--{exporter}"]
    assert main([*command, "-o", str(tmp_path / "flat.onnx"), "--json"]) == 0
    flat = json.loads(capsys.readouterr().out)
    made = [
        *command,
        "-o",
        str(tmp_path / "nested.onnx"),
        "--functions",
        "class:Block",
        "--functions",
        "head",
    ]
    assert main([*made, "--json", "--verify"]) == 0
    nested = json.loads(capsys.readouterr().out)
    assert nested["functions"] == ["htp::Block", "htp::Linear"]
    assert nested["verify"]["ok"]
    assert "functions" not in flat
    assert nested["modules"] == flat["modules"]
    assert main([*made, "--functions", "class:Blok"]) == 2
    assert "matches no module; nearest: 'Block'" in capsys.readouterr().err


def entry():
    return net(), (X,)
