"""Devices by module: exactly the regions that rules name, what fits into a budget, and what ONNX Runtime does."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.place.devices import device_named
from htp_export.capabilities.place.parts import Item, fill
from htp_export.capabilities.view.measures import measures_of
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.format.hierarchy import ModuleInfo
from htp_export.model.parts import PartTensor
from htp_export.runtime.sessions import entry_of
from tests.exporting import metadata
from tests.handmade import (
    branching,
    called_twice,
    encoder,
    model,
    tagged_node,
    value,
    weight,
    with_function,
)
from tests.nets import spread

SETTINGS = "session.layer_assignment_settings"
CPU = "CPUExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
CUDA = "CUDAExecutionProvider"

VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
lists_nodes = pytest.mark.skipif(
    VERSION < (1, 24), reason="ONNX Runtime says which provider has a node since 1.24"
)
reads_devices = pytest.mark.skipif(
    VERSION < (1, 25), reason="ONNX Runtime reads the devices of nodes since 1.25"
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.fc(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(
    scope="module", params=["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param) / "net.onnx"
    dynamo = request.param == "dynamo"
    htp_export.export(
        spread(Net()).eval(), (torch.randn(2, 8),), path, dynamo=dynamo, verbose=False
    )
    return path


def devices(model: Any) -> dict[str, str | None]:
    """Name of the first output of each node → its device."""
    nodes = htp_export.load(model).nodes
    return {str(node.outputs[0].name): node.metadata_props.get("layer_ann") for node in nodes}


# --- the rules ----------------------------------------------------------------------------------------------------


def test_the_last_rule_holds_and_exclusions_take_what_lies_below(file):
    placed = htp_export.place(
        file, {".": "cpu", "blocks.*,!blocks.1": "gpu", "blocks.2.norm": "cpu"}
    )
    expected = {
        "blocks.0": "gpu",
        "blocks.1": "cpu",
        "blocks.3": "gpu",
        "stem": "cpu",
        "head": "cpu",
    }
    assert {path: placed.modules[path].device for path in expected} == expected
    assert {node.metadata_props["layer_ann"] for node in placed.tagged["blocks.1.fc"].nodes} == {
        "cpu"
    }
    assert {node.metadata_props["layer_ann"] for node in placed.tagged["blocks.2.norm"].nodes} == {
        "cpu"
    }
    assert {node.metadata_props["layer_ann"] for node in placed.tagged["blocks.2.fc"].nodes} == {
        "gpu"
    }
    assert placed.options == {SETTINGS: "CPUExecutionProvider(=cpu); gpu(=gpu)"}
    assert placed.devices["cpu"].nodes + placed.devices["gpu"].nodes == len(placed.tagged.nodes)


def test_a_module_with_nodes_without_a_device_says_so(file):
    placed = htp_export.place(file, {"blocks.0": "gpu", "blocks.1.fc": "cpu"})
    named = {path: placed.modules[path].device for path in ("", "blocks.0", "blocks.1", "stem")}
    assert set(named[""].split(" + ")[:2]) == {"gpu", "cpu"}
    assert named[""].endswith(" + (none)")
    assert named | {"": ""} == {"": "", "blocks.0": "gpu", "blocks.1": "cpu + (none)", "stem": ""}
    assert placed.modules["blocks.1"].by_device.keys() == {"cpu"}
    assert [module.path for module in placed.listed][:2] == ["", "blocks"]


def test_a_node_of_several_modules_has_the_device_of_the_first_that_has_one():
    """`mask` does the work of both layers; the first of them needs it first."""
    assert (
        devices(htp_export.place(encoder(), {"layer.0": "gpu", "layer.1": "cpu"}))["mask"] == "gpu"
    )
    assert devices(htp_export.place(encoder(), {"layer.1": "gpu"}))["mask"] == "gpu"
    placed = htp_export.place(encoder(), {"layer.0": "cpu", "layer.1": "gpu"})
    assert [(c.tensor, c.producer, c.consumers, c.source, c.target) for c in placed.crossings] == [
        ("layer0", "layer.0", ("layer.1.fc",), "cpu", "gpu"),
        ("mask", "layer", ("layer.1",), "cpu", "gpu"),
    ]
    assert [each.bytes for each in placed.crossings] == [2 * 4 * 4] * 2
    # its shared node is on the CPU, and all others of the layer are not
    assert (placed.modules["layer.1"].device, dict(placed.modules["layer.1"].by_device)) == (
        "gpu",
        {"gpu": 2, "cpu": 1},
    )


def test_calls_of_a_module_belong_to_the_module_all_together():
    placed = htp_export.place(called_twice(), {".": "cpu", "block.fc": "gpu"})
    assert [name for name, device in devices(placed).items() if device == "gpu"] == [
        "fc0",
        "fc1",
        "fc2",
        "fc3",
    ]


def test_branches_have_devices_of_their_own_and_their_tensors_cross():
    placed = htp_export.place(branching(), {".": "cpu", "gate.yes": "gpu"})
    assert devices(placed) == {
        "minus": "cpu",
        "gated": "cpu",
        "yes": "gpu",
        "no": "cpu",
        "out": "cpu",
    }
    crossing = {(each.tensor, each.source, each.target) for each in placed.crossings}
    assert crossing == {("x", "cpu", "gpu"), ("minus", "cpu", "gpu"), ("yes", "gpu", "cpu")}


def test_functions_are_inlined():
    placed = htp_export.place(with_function(), {".": "cpu", "block.fc": "gpu"})
    assert not placed.model.functions
    kinds = {node.op_type: node.metadata_props["layer_ann"] for node in placed.model.graph}
    assert kinds == {"MatMul": "gpu", "Relu": "cpu", "Neg": "cpu"}
    assert any("inlined" in note for note in placed.notes)


def test_earlier_devices_are_replaced_and_the_model_given_is_not_changed(file):
    first = htp_export.place(file, {".": "gpu"})
    second = htp_export.place(first, {"head": "cpu"})
    assert set(devices(first).values()) == {"gpu"}
    assert [device for device in devices(second).values() if device] == ["cpu"] * len(
        second.tagged["head"].nodes
    )
    assert json.loads(second.model.metadata_props["htp.placement"]) == {
        SETTINGS: "CPUExecutionProvider(=cpu)"
    }


@reads_devices
def test_the_annotated_file_computes_the_same(file, tmp_path):
    out = tmp_path / "placed.onnx"
    placed = htp_export.place(file, {".": "cpu", "blocks": "gpu"}, out)
    flat = onnxruntime.InferenceSession(file)
    inputs = {flat.get_inputs()[0].name: np.random.default_rng(0).normal(size=(2, 8)).astype("f")}
    [expected] = flat.run(None, inputs)
    [got] = onnxruntime.InferenceSession(out, placed.session_options(quiet()), providers=[CPU]).run(
        None, inputs
    )
    assert np.array_equal(expected, got)
    onnx.checker.check_model(onnx.load(out), full_check=True)


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    # a device that no provider of the session is, is logged as an error
    options.log_severity_level = 4
    return options


@pytest.mark.parametrize(
    ("plan", "budget", "problem"),
    [
        ({"blocks": "gpu(a)"}, {}, "no device"),
        ({"blocks": 3}, {}, "no device 3"),
        ({}, {}, "no rules"),
        ({"blocks": "cpu"}, {"gpu": "1 MB"}, "no rule assigns modules to it"),
        ({"blocks": "gpu"}, {"cpu": "1 MB"}, "no budget for cpu"),
        ({"blocks": "gpu"}, {"gpu": -1}, "-1 is no size"),
        ({}, {"gpu": "1 MB", "npu": "1 MB"}, "or one budget"),
    ],
)
def test_rules_and_budgets_that_mean_nothing_are_refused(plan, budget, problem, file, tmp_path):
    with pytest.raises(InputError, match=problem):
        htp_export.place(file, plan, tmp_path / "out.onnx", budget=budget)
    assert not list(tmp_path.iterdir())


def test_words_for_devices():
    words = {
        "GPU": "gpu",
        "gpu:1": "gpu:1",
        "gpu:NVIDIA": "gpu:nvidia",
        "openvino": OPENVINO,
        CUDA.lower(): CUDA,
    }
    assert {word: device_named(word) for word in words} == words
    assert device_named("MyOwnExecutionProvider") == "MyOwnExecutionProvider"


# --- session options ----------------------------------------------------------------------------------------------


@reads_devices
def test_session_options(file, monkeypatch):
    placed = htp_export.place(file, {"blocks": "gpu"})
    own = onnxruntime.SessionOptions()
    own.intra_op_num_threads = 3
    options = placed.session_options(own)
    assert (entry_of(options, SETTINGS), options.intra_op_num_threads) == ("gpu(=gpu)", 3)
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")
    with pytest.raises(InputError, match=r"1\.24\.4 ignores the devices of nodes; it needs 1\.25"):
        placed.session_options()


# --- the budget ---------------------------------------------------------------------------------------------------


def memory(items: Sequence[Item], chosen: Sequence[int]) -> int:
    weights = {key: size for number in chosen for key, size in items[number].weights.items()}
    return sum(weights.values()) + max((items[number].peak for number in chosen), default=0)


def test_a_device_is_filled_with_what_fits_and_no_single_part_does_more():
    for seed in range(150):
        draw = random.Random(seed)
        count = draw.randint(1, 8)
        items = []
        for number in range(count):
            shared = {draw.choice("ab"): 4} if draw.random() < 0.3 else {}
            items.append(
                Item({number: draw.randint(1, 9), **shared}, draw.randint(0, 5), draw.randint(1, 9))
            )
        tensors = [PartTensor(number - 1, frozenset([number])) for number in range(count)]
        limit, slack = draw.randint(0, 40), draw.choice([0, 0.05, 0.2, 0.5])
        chosen = fill(items, tensors, limit, slack)
        fitting = [item.work for item in items if item.memory <= limit]
        assert bool(chosen) == bool(fitting), seed
        assert not chosen or memory(items, chosen) <= limit, seed
        assert sum(items[number].work for number in chosen) >= (1 - slack) * max(
            fitting, default=0
        ), seed


def test_a_budget_takes_neighbouring_blocks(file):
    """Two blocks of 8 * 8 + 8 + 8 + 8 floats fit, with the activations; any two neighbours cross as little."""
    block = (8 * 8 + 8 + 8 + 8) * 4
    peak = htp_export.cost(file).peak.bytes
    placed = htp_export.place(file, {".": "cpu", "blocks": "gpu"}, budget={"gpu": 2 * block + peak})
    on_gpu = [
        path
        for path in placed.modules
        if path.startswith("blocks.") and placed.modules[path].device == "gpu"
    ]
    blocks = [path for path in on_gpu if path.count(".") == 1]
    assert len(blocks) == 2
    first, second = (int(path.rpartition(".")[2]) for path in blocks)
    assert second == first + 1
    assert [(each.source, each.target) for each in placed.crossings] == [
        ("cpu", "gpu"),
        ("gpu", "cpu"),
    ]
    use = placed.devices["gpu"]
    assert (use.weight_bytes, use.budget) == (2 * block, 2 * block + peak)
    assert use.peak_bytes is not None
    assert use.peak_bytes <= peak
    assert {placed.modules[path].device for path in ("stem", "head")} == {"cpu"}


class Skips(nn.Module):
    """Blocks of several widths; the first result is read by the last block, too."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 12, 6, 10)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x + first)


def test_a_budget_chooses_what_trying_every_plan_finds():
    torch.manual_seed(0)
    tagged = htp_export.load(
        htp_export.export(spread(Skips()).eval(), (torch.randn(2, 8),), verbose=False)
    )
    cost = htp_export.cost(tagged)
    blocks = [f"blocks.{number}" for number in range(4)]
    work = {
        path: module.flops + module.other_flops + module.nodes
        for path, module in cost.modules.items()
    }
    tried = {}
    for size in range(1, 5):
        for chosen in itertools.combinations(blocks, size):
            placed = htp_export.place(tagged, {".": "cpu", ",".join(chosen): "gpu"})
            use = placed.devices["gpu"]
            assert use.weight_bytes is not None
            assert use.peak_bytes is not None
            needed = use.weight_bytes + use.peak_bytes
            tried[chosen] = (needed, len(placed.crossings), sum(work[path] for path in chosen))
    for budget in (1200, 1700, 2200, 2700):  # every block fits by itself, so that none is divided
        fitting = {chosen: entry for chosen, entry in tried.items() if entry[0] <= budget}
        most = max(entry[2] for entry in fitting.values())
        good = [
            (crossing, -done) for _, crossing, done in fitting.values() if done >= round(most * 0.9)
        ]
        placed = htp_export.place(tagged, {".": "cpu", "blocks": "gpu"}, budget={"gpu": budget})
        on_gpu = [path for path in blocks if placed.modules[path].device == "gpu"]
        assert (len(placed.crossings), -sum(work[path] for path in on_gpu)) == min(good), budget
    # blocks 1 and 3 are divided
    fewer = htp_export.place(tagged, {".": "cpu", "blocks": "gpu"}, budget={"gpu": 700})
    most_work = htp_export.place(
        tagged, {".": "cpu", "blocks": "gpu"}, budget={"gpu": 700}, slack=0
    )
    assert len(fewer.crossings) < len(most_work.crossings)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("20000", 20_000), (7000, 7000), ("20kb", 20_000)],
)
def test_without_rules_the_whole_model_may_go_to_the_device(text, size, file):
    everything = htp_export.place(file, budget={"gpu": text})
    assert set(devices(everything).values()) == {"gpu"}
    assert everything.devices["gpu"].budget == size


def test_what_does_not_fit_stays_outside(file):
    half = htp_export.place(file, budget={"gpu": 1200})
    assert half.devices["gpu"].weight_bytes == (8 * 8 + 8) * 4 + 2 * (8 * 8 + 8 + 8 + 8) * 4
    assert half.devices["cpu"].nodes > 0


def test_branches_go_where_the_node_around_them_goes():
    everything = htp_export.place(branching(), budget={"gpu": "1 MB"})
    assert set(devices(everything).values()) == {"gpu"}
    peak = htp_export.cost(branching()).peak.bytes
    placed = htp_export.place(branching(), {".": "cpu", "gate": "gpu"}, budget={"gpu": peak})
    assert devices(placed) == {
        "minus": "cpu",
        "gated": "gpu",
        "yes": "gpu",
        "no": "gpu",
        "out": "cpu",
    }
    with pytest.raises(InputError, match="outside of branches and loops"):
        htp_export.place(branching(), {".": "cpu", "gate.yes": "gpu"}, budget={"gpu": peak})


def test_a_weight_of_several_blocks_counts_once():
    x, shared = value("x", 8), weight("w", 8)
    first = tagged_node("MatMul", [x, shared], "a", "first")
    second = tagged_node("MatMul", [first.outputs[0], shared], "b", "second")
    tied = model(
        [x],
        [first, second],
        [shared],
        [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "a", "b")],
    )
    for node in (first, second):
        node.outputs[0].shape = ir.Shape([2, 8])
    placed = htp_export.place(tied, budget={"gpu": 8 * 8 * 4 + 3 * 2 * 8 * 4})
    assert placed.devices["gpu"].weight_bytes == 8 * 8 * 4
    assert "cpu" not in placed.devices


def test_open_dimensions_are_told(tmp_path):
    out = tmp_path / "open.onnx"
    shapes = ({0: torch.export.Dim("batch")},)
    htp_export.export(
        spread(Net(blocks=1)).eval(),
        (torch.randn(2, 8),),
        out,
        dynamic_shapes=shapes,
        verbose=False,
    )
    assumed = htp_export.place(out, {".": "cpu", "blocks": "gpu"})
    assert any("batch" in note for note in assumed.notes)
    told = htp_export.place(out, {".": "cpu", "blocks": "gpu"}, dims={"batch": 64})
    assert [each.bytes for each in told.crossings] == [
        64 * each.bytes for each in assumed.crossings if each.bytes
    ]


# --- what ONNX Runtime does ---------------------------------------------------------------------------------------


@lists_nodes
def test_the_nodes_of_each_provider_are_those_that_onnx_runtime_lists(file):
    options = quiet()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(file, options, providers=[CPU])
    listed = [
        node.name
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]
    result = htp_export.placement(file)
    assert result.providers == {CPU: len(listed)}
    assert result.modules[""].by_device == {CPU: len(listed)}
    assert not result.unattributed
    assert result.crossings == ()
    assert {module.device for module in result.modules.values() if module.nodes} == {CPU}


@reads_devices
def test_nodes_that_run_elsewhere_than_their_device_are_told(file, tmp_path):
    """With the CPU alone, what should be on a GPU is on the CPU; a fault planted in one node is seen in this node."""
    out = tmp_path / "placed.onnx"
    htp_export.place(file, {".": "cpu"}, out)
    sound = htp_export.placement(out)
    assert (sound.misplaced, dict(sound.options)) == ((), {SETTINGS: "CPUExecutionProvider(=cpu)"})
    broken = onnx.load(out)
    node = next(
        node for node in broken.graph.node if metadata(node)["htp.module"] == "blocks.2.norm"
    )
    next(entry for entry in node.metadata_props if entry.key == "layer_ann").value = "gpu"
    found = htp_export.placement(broken)
    assert [(each.modules, each.device, each.provider) for each in found.misplaced] == [
        (("blocks.2.norm",), "gpu", CPU)
    ]
    assert "1 node runs on CPUExecutionProvider and not on gpu" in found.notes


@reads_devices
def test_a_file_sets_no_other_session_option_and_broken_ones_are_refused(file, tmp_path):
    placed = htp_export.place(file, {".": "cpu"}, tmp_path / "placed.onnx")
    props, written = placed.model.metadata_props, tmp_path / "written.onnx"
    props["htp.placement"] = json.dumps(
        {**placed.options, "session.optimized_model_external_initializers_file_name": str(written)}
    )
    assert dict(htp_export.placement(placed.model).options) == dict(placed.options)
    for broken in ("[]", "{"):
        props["htp.placement"] = broken
        with pytest.raises(
            InputError,
            match=r"htp\.placement is not a JSON object of session configuration entries",
        ):
            htp_export.placement(placed.model)


@reads_devices
def test_a_setting_that_onnx_runtime_does_not_accept_is_refused(file, tmp_path, capsys):
    longest = 8192  # onnxruntime/core/session/onnxruntime_session_options_config_keys.h
    placed = htp_export.place(file, {".": "cpu"}, tmp_path / "placed.onnx").model
    for text in ("x" * (longest + 1), "\ud800"):
        placed.metadata_props["htp.placement"] = json.dumps({SETTINGS: text})
        with pytest.raises(
            InputError,
            match=rf"its metadata 'htp\.placement': ONNX Runtime does not accept .*{SETTINGS}",
        ):
            htp_export.placement(placed)
    onnx.save(
        changed_metadata(tmp_path / "placed.onnx", SETTINGS, "x" * 9000), tmp_path / "long.onnx"
    )
    assert main(["place", str(tmp_path / "long.onnx"), "--show"]) == 2
    assert (
        "long.onnx: its metadata 'htp.placement': ONNX Runtime does not accept the entry"
        in capsys.readouterr().err
    )
    provider = f"{'X' * longest}ExecutionProvider"
    with pytest.raises(InputError, match="ONNX Runtime does not accept the entry"):
        htp_export.place(file, {".": provider}, tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def changed_metadata(file: Path, name: str, text: str) -> onnx.ModelProto:
    """A file whose session configuration entry of a name has another text."""
    proto = onnx.load(file)
    for entry in proto.metadata_props:
        if entry.key == "htp.placement":
            entry.value = json.dumps({name: text})
    return proto


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", "9" * 5000 + " MB"])
def test_a_budget_of_any_number_of_digits_is_no_size(size, file):
    with pytest.raises(InputError, match=r"budget of gpu: .* is no size"):
        htp_export.place(file, budget={"gpu": size})


@lists_nodes
def test_options_of_the_user_are_used_and_restored(file):
    options = quiet()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(SETTINGS, "CPUExecutionProvider(=other)")
    placed = htp_export.place(file, {".": "cpu"})
    result = htp_export.placement(placed, session_options=options)
    assert result.options == {SETTINGS: "CPUExecutionProvider(=other)"}
    assert result.modules[""].by_device == {
        CPU: len([n for n in placed.tagged.nodes if n.op_type != "Constant"])
    }
    assert options.optimized_model_filepath == ""
    assert entry_of(options, "session.record_ep_graph_assignment_info") in ("", "0")


@lists_nodes
def test_branches_and_nodes_without_names_are_attributed():
    net = branching()
    for node in net.graph.all_nodes():
        node.name = ""
    result = htp_export.placement(net, session_options=basic())
    assert result.modules["gate.yes"].by_device == {CPU: 1}
    assert result.modules[""].by_device == result.providers == {CPU: 5}


def basic() -> onnxruntime.SessionOptions:
    options = quiet()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return options


@lists_nodes
def test_missing_providers_and_old_versions_are_refused(file, monkeypatch):
    with pytest.raises(InputError, match="this ONNX Runtime has no NoSuchExecutionProvider"):
        htp_export.placement(file, providers=["NoSuchExecutionProvider"])
    for base in onnxruntime.InferenceSession.__mro__:
        if "get_provider_graph_assignment_info" in vars(base):
            monkeypatch.delattr(base, "get_provider_graph_assignment_info")
    with pytest.raises(InputError, match="does not report the execution provider of a node"):
        htp_export.placement(file)


def test_copies_between_memories_are_read_from_the_graph_that_runs():
    """As ONNX Runtime writes them for a GPU: the copy to it makes a new tensor, that from it makes the old one."""
    from htp_export.runtime.assignments import _remove_copies

    x, y = value("x"), value("y")
    there = ir.node("MemcpyFromHost", [x], outputs=[value("x_CUDAExecutionProvider")])
    work = ir.node("Relu", there.outputs, outputs=[value("y_CUDAExecutionProvider")])
    back = ir.node("MemcpyToHost", work.outputs, outputs=[y])
    graph = ir.Graph([x], [y], nodes=[there, work, back], opset_imports={"": 20})
    assert _remove_copies(ir.Model(graph, ir_version=10)) == {"x", "y"}
    assert [(node.op_type, node.inputs[0].name, node.outputs[0].name) for node in graph] == [
        ("Relu", "x", "y")
    ]
    assert [output.name for output in graph.outputs] == ["y"]


@pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu and a GPU"
)
def test_cuda_takes_exactly_what_is_placed_there(file, tmp_path):
    out = tmp_path / "placed.onnx"
    htp_export.place(file, {".": "cpu", "blocks": "gpu"}, out)
    result = htp_export.placement(out, providers=[CUDA, CPU])
    assert not result.misplaced
    where = {path: result.modules[path].device for path in ("stem", "blocks", "head")}
    assert where == {"stem": CPU, "blocks": CUDA, "head": CPU}
    crossing = {(each.source, each.target, each.copied) for each in result.crossings}
    assert crossing == {(CPU, CUDA, True), (CUDA, CPU, True)}


# --- other steps, the command line, the page ----------------------------------------------------------------------


def test_what_other_steps_leave_of_the_devices(file, tmp_path):
    """Nodes that remain keep their devices, new ones have none, and ONNX Runtime removes all of them."""
    out, saved = tmp_path / "placed.onnx", tmp_path / "saved.onnx"
    htp_export.place(file, {".": "cpu", "blocks": "gpu"}, out)
    before = devices(out)
    optimized = devices(htp_export.optimize(out))
    assert all(
        device in (None, before[name]) for name, device in optimized.items() if name in before
    )
    assert {"cpu", "gpu"} <= set(optimized.values())
    options = quiet()
    options.optimized_model_filepath = str(saved)
    onnxruntime.InferenceSession(out, options, providers=[CPU])
    assert set(devices(htp_export.carry(out, saved)).values()) == {None}


@reads_devices
def test_commands(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(".: cpu\nblocks: gpu\n")
    assert (
        main(
            [
                "place",
                str(file),
                "plan.yaml",
                "--rule",
                "blocks.0=cpu",
                "-o",
                "placed.onnx",
                "--json",
            ]
        )
        == 0
    )
    placed = json.loads(capsys.readouterr().out)
    found = {path: module["device"] for path, module in placed["modules"].items()}
    assert (found["blocks.0"], found["blocks.1"], found["stem"]) == ("cpu", "gpu", "cpu")
    assert (placed["file"], placed["free"]) == ("placed.onnx", 0)
    assert main(["place", "placed.onnx", "--show", "--providers", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["options"] == placed["options"]
    assert result["modules"]["blocks.1"]["device"] == CPU
    assert len(result["misplaced"]) > 0
    assert main(["place", str(file), "-o", "budget.onnx", "--budget", "gpu=1200"]) == 0
    text = capsys.readouterr().out
    assert "1.200 kB" in text
    assert "next: htp-export place budget.onnx --show --providers cuda,cpu" in text
    assert main(["place", "placed.onnx", "--show", "--csv"]) == 0
    assert capsys.readouterr().out.startswith(
        "module,class_name,device,nodes,weight_bytes,crossing_bytes\n"
    )


@lists_nodes
def test_pages_and_notebooks_show_devices(file):
    from htp_export.reporting.result import drawn_html

    placed = htp_export.place(file, {".": "cpu", "blocks": "gpu"})
    for result in (placed, placed.to_dict()):
        [device] = [measure for measure in measures_of(result) if measure.key == "device"]
        assert device.named
        assert (device.words["stem"], device.words["blocks"]) == ("cpu", "gpu")
    assert "blocks" in (drawn_html(placed) or "")
    assert CPU in (drawn_html(htp_export.placement(file)) or "")
