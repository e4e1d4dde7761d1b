"""Graphs of PyTorch models for inspection: which way they are got, where better ways stop, and what is in them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.costs.costing import cost
from htp_export.errors import FileError, InputError
from htp_export.exporter.torch_programs import exported_graph
from tests import traceless
from tests.exporting import quick
from tests.nets import NETS, Holding
from tests.traceless import line_of, spread
from tests.view.test_view import page_data_of


def trained_size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_tree(inspected: htp_export.results.Inspected, model: nn.Module) -> None:
    """Every module is in the tree, parameters add up, and every node has owners."""
    tagged = inspected.tagged
    assert set(dict(model.named_modules())) <= set(tagged.paths)
    assert cost(inspected).modules[""].parameters == trained_size(model)
    assert tagged.nodes
    assert tagged.untagged == []


# Nets that torch's exporter folds and merges nothing of that counts.
PLAIN = (
    "branches_inside_branches", "called_twice", "cond", "cond_over_self", "dropout_and_identity", "identity_at_the_end",
    "modules_in_branches", "other_names_of_operators", "outside_and_in_a_branch", "tied_weights", "transformer_encoder",
    "two_names", "uneven_calls", "view_changed_and_read",
)  # fmt: skip


@pytest.mark.parametrize("name", quick(PLAIN, "called_twice"))
def test_the_graph_of_torch_export_has_the_tree_parameters_and_flops_of_the_onnx_file(
    name, shared_files
):
    onnx_model = htp_export.load(shared_files.net(name, "dynamo"))
    model, kwargs = NETS[name].build()
    torch_graph = htp_export.load(exported_graph(model, (), kwargs))
    assert torch_graph.paths == onnx_model.paths
    assert torch_graph.untagged == []
    costs = [cost(tagged).modules for tagged in (onnx_model, torch_graph)]
    expected, found = [
        {
            path: (m.class_name, m.calls, m.fate, m.parameters, m.flops)
            for path, m in modules.items()
        }
        for modules in costs
    ]
    assert found == expected
    assert cost(torch_graph).uncounted == {}


class Counted(nn.Module):
    """One of each layer that has multiply-adds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv1d(4, 6, 3, groups=2),
            nn.Conv2d(1, 2, 3, stride=2, padding=1),
        )
        self.up = nn.ConvTranspose2d(2, 3, 3, stride=2)
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.fc = nn.GRU(10, 4, batch_first=True), nn.Linear(4, 7, bias=False)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        picture = self.up(self.conv2(x[:, None]))
        y = self.gru(self.lstm(self.conv1(x).transpose(1, 2))[0])[0]
        y = self.attention(y, y, y)[0]
        scores = nn.functional.scaled_dot_product_attention(
            y[None], y[None], y[None], is_causal=True
        )[0]
        return (
            picture,
            self.fc(y),
            torch.einsum("bik,bjk->bij", y, y),
            torch.addmm(y[0], scores[0], y[0].mT @ y[1]),
        )


@pytest.mark.long
def test_every_layer_with_multiply_adds_counts_as_in_the_onnx_file():
    model = spread(Counted())
    x = torch.randn(2, 4, 9)
    expected, found = (
        cost(htp_export.export(model, (x,), verbose=False)),
        cost(exported_graph(model, (x,), {})),
    )
    assert found.uncounted == {}
    sides = [
        {path: (m.flops, m.parameters) for path, m in each.modules.items()}
        for each in (expected, found)
    ]
    assert {path: sides[1][path] for path in sides[0]} == sides[0]


@pytest.fixture(scope="module")
def orthogonal() -> tuple[nn.Module, htp_export.results.Inspected]:
    model = spread(traceless.WithOrthogonal())
    return model, htp_export.inspect(model, torch.randn(4, 4))


@pytest.fixture(scope="module")
def detector() -> tuple[nn.Module, htp_export.results.Inspected]:
    model = spread(traceless.Detector())
    return model, htp_export.inspect(model, torch.randn(1, 3, 16, 16))


def test_an_operator_without_translation_is_got_by_torch_export(orthogonal):
    model, inspected = orthogonal
    (stop,) = inspected.stopped
    line = line_of(traceless.Orthogonal, "torch.linalg.qr")
    assert (inspected.way, stop.way, stop.module) == ("torch.export", "onnx", "orthogonal")
    assert (stop.file, stop.line) == (traceless.__file__, line)
    assert (
        "No ONNX function found for <OpOverload(op='aten.linalg_qr', overload='default')>"
        in stop.reason
    )
    check_tree(inspected, model)
    nodes = [(n.domain, n.op_type, n.metadata_props["htp.module"]) for n in inspected.model.graph]
    assert nodes == [
        ("aten", "linear", "orthogonal.block.fc"),
        ("aten", "relu", "orthogonal.block"),
        ("aten", "linalg_qr", "orthogonal"),
        ("aten", "linear", "head"),
    ]
    report = cost(inspected)
    assert report.uncounted == {"linalg_qr": 1}
    assert report.modules[""].flops == 2 * (4 * 4 * 4 + 4 * 4 * 3)


@pytest.mark.parametrize(
    ("net", "cause", "texts"),
    [
        (traceless.WithFunction, traceless.Doubled, ("torch.linalg.qr",)),
        # Which of them depends on the torch. `test_what_a_model_prints_is_not_in_the_result` inspects this net, too.
        pytest.param(
            traceless.Prints, traceless.Prints, ("np.abs", "float(scale)"), marks=pytest.mark.slow
        ),
    ],
)
def test_custom_functions_prints_and_numpy_are_got_by_torch_export(net, cause, texts):
    model = spread(net())
    inspected = htp_export.inspect(model, torch.randn(4, 4))
    (stop,) = inspected.stopped
    assert (inspected.way, stop.way, stop.file) == ("torch.export", "onnx", traceless.__file__)
    assert stop.line in [line_of(cause, text) for text in texts]
    check_tree(inspected, model)


def test_values_that_are_only_printed_are_no_hindrance_to_symbolic_tracing():
    model = spread(traceless.Watched())
    inspected = htp_export.inspect(model, (torch.randn(2, 4),), kwargs={"scale": 3.0})
    assert inspected.way == "torch.fx"
    line = line_of(traceless.Watched, "numpy().tobytes()")
    assert [(stop.way, stop.module, stop.line) for stop in inspected.stopped] == [
        ("onnx", "", line),
        ("torch.export", "", line),
    ]
    check_tree(inspected, model)
    nodes = [(node.op_type, node.metadata_props["htp.module"]) for node in inspected.model.graph]
    expected = {"linear": "block.fc", "relu": "block", "mul": "", "layer_norm": "norm.0"}
    assert nodes == [*expected.items(), ("linear", "head")]
    tree = inspected.tagged.hierarchy
    assert (tree["norm.1"].fate, tree["norm.0"].fate, tree["norm.0"].calls) == (
        "identity",
        "computed",
        1,
    )
    assert cost(inspected).modules[""].flops == 2 * 2 * (4 * 4 + 4 * 3)
    with pytest.raises(FileError, match=r"by torch\.fx, is for inspection"):
        inspected.tagged.save("model.onnx")


class Given(nn.Module):
    """Its modules inside give back what they are given, or only seem to."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.both = nn.Identity(), nn.Sequential(nn.Dropout(), nn.Identity())
        self.fc, self.relu, self.unused = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(self.relu(self.fc(self.nothing(x))))


class GivenAndWatched(Given):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        print("bytes", y.detach().numpy().tobytes())
        return y


class GivenAndChosen(Given):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "way"), [(GivenAndWatched, "torch.fx"), (GivenAndChosen, "dynamo")]
)
def test_modules_that_give_back_their_input_are_identities(net, way):
    inspected = htp_export.inspect(spread(net()), torch.randn(2, 4))
    assert inspected.way == way
    fates = {path: str(module.fate) for path, module in inspected.tagged.hierarchy.items()}
    assert {fates.pop(path) for path in ("", "fc", "relu")} == {"computed"}
    assert fates.pop("unused") == "uncalled"
    assert fates == dict.fromkeys(("nothing", "both", "both.0", "both.1"), "identity")


@pytest.mark.long
def test_what_symbolic_tracing_gets_wrong_is_refused():
    model = spread(traceless.Deceiving())
    inspected = htp_export.inspect(model, torch.randn(2, 4))
    assert inspected.way == "dynamo"
    assert [stop.way for stop in inspected.stopped] == ["onnx", "torch.export", "torch.fx"]
    assert "gives another result than the model" in inspected.stopped[-1].reason
    check_tree(inspected, model)


@pytest.mark.long
def test_a_branch_that_depends_on_data_is_got_by_dynamo():
    model = spread(traceless.WithChoosing())
    x = torch.rand(2, 4)
    inspected = htp_export.inspect(model, x)
    line = line_of(traceless.Choosing, "x.sum().item()")
    assert inspected.way == "dynamo"
    for stop in inspected.stopped:
        assert (stop.module, stop.file, stop.line) == ("choosing", traceless.__file__, line)
    reasons = {stop.way: stop.reason for stop in inspected.stopped}
    assert list(reasons) == ["onnx", "torch.export", "torch.fx"]
    for way in ("onnx", "torch.export"):
        assert "Could not guard on data-dependent expression" in reasons[way]
    assert reasons["torch.fx"].startswith(
        "TraceError: symbolically traced variables cannot be used"
    )
    assert [(stop.module, stop.line) for stop in inspected.breaks] == [("choosing", line)]
    check_tree(inspected, model)
    owners = [
        node.metadata_props["htp.module"]
        for node in inspected.model.graph
        if node.op_type == "linear"
    ]
    assert owners == ["first.fc", "choosing.one.fc", "choosing.other.fc", "head"]
    assert cost(inspected).modules[""].flops == 2 * 2 * (3 * 4 * 4 + 4 * 3)
    # Connected from graph to graph: only what the user gives is an input, and weights have their names.
    assert [value.name.rpartition("/")[2] for value in inspected.model.graph.inputs] == ["l_x_"]
    assert set(inspected.model.graph.initializers) == set(dict(model.named_parameters()))


@pytest.mark.long
def test_a_detector_with_non_maximum_suppression_is_got_by_dynamo(detector):
    model, inspected = detector
    lines = [line_of(traceless.keep_best, text) for text in ("while order", "low =")]
    assert inspected.way == "dynamo"
    assert [stop.way for stop in inspected.stopped] == ["onnx", "torch.export", "torch.fx"]
    assert {(stop.module, stop.file) for stop in inspected.stopped} == {("", traceless.__file__)}
    assert {stop.line for stop in inspected.stopped} <= set(lines)
    check_tree(inspected, model)
    report = cost(inspected)
    plain = cost(htp_export.export(model.backbone, (torch.randn(1, 3, 16, 16),), verbose=False))
    assert report.modules["backbone"].flops == plain.modules[""].flops
    assert report.modules["head"].flops == 2 * 5 * 4 * 4 * 4
    names = {node.name.partition("/")[0] for node in inspected.model.graph}
    assert names == {"graph_1", "graph_2"}
    sizes = {
        name: sum(node.name.startswith(name) for node in inspected.model.graph)
        for name in sorted(names)
    }
    assert sizes["graph_1"] > sizes["graph_2"]
    assert {name: len(list(graph.graph)) for name, graph in inspected.graphs.items()} == sizes
    assert list(inspected.graphs) == ["graph_1", "graph_2"]
    assert cost(inspected.graphs["graph_1"]).modules[""].flops == report.modules[""].flops
    with pytest.raises(FileError, match="by dynamo, is for inspection"):
        htp_export.load(inspected.graphs["graph_2"]).save("model.onnx")


@pytest.mark.slow
def test_a_loop_over_numbers_breaks_a_graph_and_loses_none():
    model, x = spread(traceless.Counting()), torch.rand(2, 4)
    inspected = htp_export.inspect(model, x)
    assert inspected.way == "dynamo"
    ops = [node.op_type for node in inspected.model.graph]
    assert ops[:5] == ["exp", "linear", "tanh", "abs", "sum"]
    assert ops[-1] == "sigmoid"
    assert [(stop.module, stop.line) for stop in inspected.breaks] == [
        ("", line_of(traceless.Counting, ".tolist()"))
    ]
    check_tree(inspected, model)


@pytest.mark.long
def test_a_function_that_runs_and_is_in_no_graph_is_a_break(capfd):
    model = spread(traceless.SearchingDetector())
    inspected = htp_export.inspect(model, torch.randn(1, 3, 16, 16))
    assert inspected.way == "dynamo"
    owners = {node.metadata_props["htp.module"].partition(".")[0] for node in inspected.model.graph}
    assert owners == {"backbone", "head"}
    (stop,) = inspected.breaks
    line = line_of(traceless.SearchingDetector, "int(order[0])")
    assert (stop.module, stop.file, stop.line) == ("", traceless.__file__, line)
    assert str(stop) in str(inspected)
    assert "TORCHDYNAMO" not in capfd.readouterr().err


@torch.library.custom_op("htp_export_tests::trimmed", mutates_args=())
def trimmed(x: torch.Tensor) -> torch.Tensor:
    return x[: int((x.sum(1) > 0).sum())].clone()


@trimmed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    # and another one for the result: torch does not find the first one
    torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


@pytest.mark.long
def test_dynamo_does_without_symbols_for_data_where_it_fails_with_them():
    class Trims(traceless.WithHead):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(self.block(x)) + 1
            result: torch.Tensor = torch.cos(self.head(trimmed(y)))
            return result

    model = spread(Trims())
    inspected = htp_export.inspect(model, torch.randn(2, 4))
    assert inspected.way == "dynamo"
    assert "Pending unbacked symbols" in inspected.stopped[1].reason
    assert [stop.module for stop in inspected.breaks] == [""]
    check_tree(inspected, model)
    # Not only the graphs of the modules inside, but also what ``forward`` itself computes before and after the break.
    assert [node.op_type for node in inspected.model.graph] == [
        "linear",
        "relu",
        "sin",
        "add",
        "linear",
        "cos",
    ]


def test_a_loop_over_a_tensor_is_got_by_dynamo_once_for_each_round():
    model = spread(traceless.Repeating())
    x = torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1], [2, 2, 2, 2]])
    inspected = htp_export.inspect(model, x)
    assert inspected.way == "dynamo"
    line = line_of(traceless.Repeating, "if row.sum()")
    loop = line_of(traceless.Repeating, "for row in x")
    assert {(stop.module, stop.line) for stop in inspected.stopped} == {("", line), ("", loop)}
    check_tree(inspected, model)
    rounds = int((x.sum(1) > 0).sum())
    assert rounds == 2
    report = cost(inspected)
    assert (report.modules["block"].calls, report.modules["block"].flops) == (
        rounds,
        rounds * 2 * 3 * 4 * 4,
    )
    assert report.modules[""].flops == rounds * 2 * 3 * 4 * 4 + 2 * 3 * 4 * 3


def test_equal_modules_that_run_one_graph_are_told_apart():
    class Two(Holding, layers=nn.ModuleList(traceless.Choosing() for _ in range(2))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = spread(Two())
    inspected = htp_export.inspect(model, torch.ones(2, 4))
    check_tree(inspected, model)
    modules = cost(inspected).modules
    for path in ("layers.0.other", "layers.1.other"):
        assert (modules[path].nodes, modules[path].flops) == (2, 64)
    other = inspected.tagged["layers.1.other.fc"].nodes[0]
    assert [value.name for value in other.inputs[1:]] == [
        "layers.1.other.fc.weight",
        "layers.1.other.fc.bias",
    ]


def test_dynamo_keeps_nothing_of_an_inspection():
    seen: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph.forward

    model = spread(traceless.WithChoosing())
    x = torch.ones(2, 4)
    own = torch.compile(model, backend=backend)
    own(x)
    compiled, counters = len(seen), dict(torch._dynamo.utils.counters["stats"])
    codes = torch._C._dynamo.eval_frame
    block, repeating = traceless.Block.forward.__code__, traceless.Repeating.forward.__code__
    entries = [len(codes._debug_get_cache_entry_list(code)) for code in (block, repeating)]
    known = set(torch._dynamo.convert_frame.input_codes.seen_ids)
    assert htp_export.inspect(spread(traceless.Repeating()), x).way == "dynamo"
    assert [len(codes._debug_get_cache_entry_list(code)) for code in (block, repeating)] == entries
    assert torch._dynamo.convert_frame.input_codes.seen_ids == known
    assert dict(torch._dynamo.utils.counters["stats"]) == counters
    assert torch._dynamo.config.recompile_limit == 8
    own(x)
    assert len(seen) == compiled
    torch._dynamo.reset()


@pytest.mark.long
def test_a_failure_inside_dynamo_leaves_the_model_as_it_was():
    class Counts(nn.Module):
        runs: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("runs", torch.zeros(()))
            self.list, self.block = [1], traceless.Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            self.list.append(2)
            self.block(x)
            raise ValueError("no result")

    model = spread(Counts())
    inspected = htp_export.inspect(model, torch.ones(2, 4))
    assert inspected.way == "parts"
    assert "ValueError: no result" in inspected.failures[""]
    assert (float(model.runs), model.list) == (0, [1])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.long
def test_a_compiled_model_is_left_to_its_compiler():
    class Chosen(Holding, relu=nn.ReLU()):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(x) if x.sum().item() > 0 else x

    inspected = htp_export.inspect(
        torch.compile(Chosen().eval(), backend="eager"), torch.ones(2, 4)
    )
    assert inspected.stopped[-1].reason.endswith("is compiled: its graphs are the compiler's")


def test_a_model_that_exports_is_got_by_the_export():
    model = spread(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    inspected = htp_export.inspect(model, (torch.randn(2, 4),))
    assert (inspected.way, inspected.stopped) == ("onnx", ())
    assert str(inspected) == "graph by ONNX export"
    check_tree(inspected, model)


def test_a_graph_of_torch_operators_is_not_written(orthogonal, tmp_path):
    _, inspected = orthogonal
    for write in (
        lambda file: inspected.tagged.save(file),
        lambda file: htp_export.extract(inspected, "head", file),
        lambda file: htp_export.optimize(inspected, file),
    ):
        with pytest.raises(FileError, match=r"by torch\.export, is for inspection"):
            write(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_arguments_are_taken_by_keyword_and_the_model_stays_as_it_was():
    model = spread(nn.Sequential(traceless.WithOrthogonal(), nn.BatchNorm1d(3)))
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = torch.randn(4, 4)
    seed = torch.get_rng_state()
    inspected = htp_export.inspect(model, kwargs={"input": given})
    assert inspected.way == "torch.export"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert torch.equal(seed, torch.get_rng_state())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.long
def test_a_model_that_does_not_run_has_no_graph():
    with pytest.raises(
        InputError,
        match=r"no graph\nonnx stopped in module \(the root\): RuntimeError: .* reduction dim",
    ):
        htp_export.inspect(nn.Linear(4, 3), torch.randn(2, 5))


def test_weights_of_a_graph_are_the_models_own_memory(orthogonal):
    model, inspected = orthogonal
    weight = inspected.model.graph.initializers["head.weight"].const_value
    assert np.shares_memory(weight.numpy(), model.get_parameter("head.weight").detach().numpy())


@pytest.mark.long
def test_views_take_no_memory_of_their_own():
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.linalg.qr(x.reshape(4, 4).transpose(0, 1)[None].to(torch.float32))[0].to(
                torch.float64
            )

    inspected = htp_export.inspect(Views(), torch.randn(16))
    made = {node.op_type: node.activation_bytes for node in cost(inspected).nodes}
    assert made.pop("linalg_qr") == 128
    assert made.pop("to", 0) + made.pop("_to_copy", 0) == 128  # the conversion makes a tensor
    assert set(made.values()) == {0}


def test_a_page_says_which_way_its_graph_was_got(orthogonal):
    shown = htp_export.view(orthogonal[1], explorer=False)
    assert (shown.way, shown.nodes, shown.modules) == ("torch.export", 4, 5)
    assert [stop.module for stop in shown.stopped] == ["orthogonal"]
    assert "onnx stopped in module orthogonal" in str(shown)
    assert "onnx stopped in module orthogonal" in shown.html


def test_a_page_has_a_choice_between_dynamos_graphs(detector):
    shown = htp_export.view(detector[1], explorer=False)
    graphs = page_data_of(shown.html, "graphs")
    sizes = [len(page_data_of(shown.html, part)["nodes"]) for part in ("data", "data-1", "data-2")]
    assert shown.nodes == sizes[0] == sizes[1] + sizes[2]
    assert sizes[1] > sizes[2]
    titles = ["all 2 graphs", f"graph 1 of 2: {sizes[1]} nodes", f"graph 2 of 2: {sizes[2]} nodes"]
    assert [each["title"] for each in graphs] == titles
    assert "graph break in module (the root)" in graphs[0]["note"]


FACTORIES = """
import torch
from tests import traceless

def orthogonal():
    return traceless.spread(traceless.WithOrthogonal()), (torch.randn(4, 4),)

def prints():
    return traceless.spread(traceless.Prints()), (torch.randn(2, 4),)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "own_models"


@pytest.mark.long
@pytest.mark.parametrize("command", quick(["tree", "cost", "view"], "cost", "view"))
def test_commands_take_an_entry_and_say_which_way(command, factories, capsys):
    more = ["--no-explorer"] if command == "view" else []
    assert main([command, "--entry", f"{factories}:orthogonal", "--json", *more]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert data["way"] == "torch.export"
    (stop,) = data["stopped"]
    assert (stop["way"], stop["module"]) == ("onnx", "orthogonal")
    assert stop["line"] == line_of(traceless.Orthogonal, "torch.linalg.qr")
    if command != "view":
        assert data["modules"][""]["parameters"] == 35
    else:
        assert (data["file"], Path("model.html").exists()) == ("model.html", True)
    assert "htp-export: graph by torch.export" in shown.err
    assert "htp-export: onnx stopped in module orthogonal" in shown.err


@pytest.mark.long
def test_what_a_model_prints_is_not_in_the_result(factories, capsys):
    assert main(["tree", "--entry", f"{factories}:prints", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["way"] == "torch.export"


@pytest.mark.long
def test_commands_take_a_model_type(capsys):
    small = [
        "hidden_size=16",
        "num_hidden_layers=1",
        "num_attention_heads=2",
        "intermediate_size=16",
        "vocab_size=30",
    ]
    settings = [word for setting in small for word in ("--set", setting)]
    assert main(["tree", "bert", "--random-weights", *settings, "--depth", "1"]) == 0
    shown = capsys.readouterr()
    assert "BertEmbeddings" in shown.out
    assert "graph by ONNX export" in shown.err


def test_files_of_graphs_in_other_domains_are_still_written(tmp_path):
    node = ir.node("ATen", [ir.val("x", ir.DataType.FLOAT, [2])], domain="aten")
    graph = ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={"": 20, "aten": 1})
    htp_export.load(ir.Model(graph, ir_version=10)).save(tmp_path / "old.onnx")
    assert (tmp_path / "old.onnx").exists()
