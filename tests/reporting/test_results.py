"""Every result, at a prompt and in a notebook, and what it says of a module that it does not have."""

import copy
import dataclasses
import importlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export import results
from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.page.document import page_data
from htp_export.command.main import main
from htp_export.costs.result import tree_rows
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError, UnknownModuleError
from htp_export.format import tags
from htp_export.reporting.columns import Column
from htp_export.reporting.result import Modules, Result
from htp_export.reporting.tables import ModuleTable
from htp_export.tools import float16, quantize_dynamic, quantize_static
from tests.all_commands import COMMANDS, arguments, companions, example
from tests.exporting import exported_once
from tests.handmade import with_function
from tests.nets import Holding, x

MOST = 500  # characters that a prompt shows


@pytest.fixture(scope="module")
def made(run: tuple[dict[str, list[Any]], list[str]]) -> dict[str, list[Any]]:
    """The results: class → results."""
    return run[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], list[str]]:
    """Results of all commands, and of functions without one, of a net with HTML in a name, by class.

    And which of them drew numbers from the random generators of the process.
    """
    folder = tmp_path_factory.mktemp("results")
    model, args = example()
    files = {"FILE": str(folder / "net.onnx"), **companions(folder)}
    tagged = htp_export.load(htp_export.export(model, args, verbose=False))
    found: dict[str, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        wrapped = Result.__post_init__

        def noted(result: Any) -> None:
            wrapped(result)
            found.setdefault(type(result).__name__, []).append(result)

        patch.setattr(Result, "__post_init__", noted)
        patch.chdir(folder)
        tagged.model.metadata_props[tags.MODULES] = tagged.model.metadata_props[
            tags.MODULES
        ].replace("linear.Linear", "<script>")
        tagged.save(files["FILE"])
        importlib.import_module("rich.style")  # which draws a number when it is imported
        before = random_states()
        draws: list[str] = []
        for command in COMMANDS:
            typed = arguments(command, files)
            main([*typed, "--json"] if command == "pipeline" else typed)
            draws += [command] * (random_states() != before)
            before = random_states()
        main(["nodes", files["FILE"], "--node", "0"])
        main(["lora", "insert", files["FILE"], "first", "-o", "lora.onnx"])
        main(["lora", "adapter", "lora.onnx", files["ADAPTER"], "-o", "lora.onnx_adapter"])
        attention, inputs = torch.nn.MultiheadAttention(4, 2).eval(), tuple(torch.randn(3, 2, 2, 4))
        before = random_states()
        htp_export.attention_report(attention, inputs)
        htp_export.inspect(model, args)
        program = htp_export.export(model, args, verbose=False)
        htp_export.contamination(program)
        htp_export.verify(model, program, args)
        htp_export.search(built, {"width": [2, 4]}, trials=2)
        draws += ["functions of models"] * (random_states() != before)
    return found, draws


def built(choice: dict[str, int]) -> tuple[torch.nn.Module, torch.Tensor]:
    """A candidate of a search over architectures."""
    return torch.nn.Linear(2, choice["width"]), torch.ones(1, 2)


def random_states() -> list[str]:
    """The states of the random generators that a whole process shares."""
    _, numbers, *rest = np.random.get_state()  # noqa: NPY002
    return [
        repr(random.getstate()),
        repr((numbers.tolist(), rest)),
        repr(torch.get_rng_state().tolist()),
    ]


@pytest.mark.long
def test_no_command_draws_from_the_generators_of_the_process(run):
    assert run[1] == []


RESULTS = [name for name in results.__all__ if issubclass(getattr(results, name), Result)]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_short_at_a_prompt_and_a_table_in_a_notebook(name, made):
    for result in made[name]:
        assert repr(result).startswith(f"{name}: ")
        assert len(repr(result)) <= MOST
        assert "\n" not in repr(result)
        drawn = result._repr_html_()
        assert drawn.startswith("<")
        assert "<script>" not in drawn or name == "View"
        assert (
            result.table() is None or str(result).count("\n") == 0 or len(drawn) > len(repr(result))
        )


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_can_be_copied_and_the_copy_has_a_model_of_its_own(name, made):
    for result in made[name]:
        copied = copy.deepcopy(result)
        assert type(copied) is type(result)
        assert plain_text(copied) == plain_text(result)
        for field in dataclasses.fields(result):
            model = getattr(result, field.name)
            if isinstance(model, ir.Model):
                assert getattr(copied, field.name) is not model


def plain_text(result: Result) -> str:
    return json.dumps(result.to_dict(), sort_keys=True, default=str)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_with_a_table_is_a_data_frame(name, made):
    for result in made[name]:
        table = result.table()
        if table is None:
            with pytest.raises(InputError, match=f"{name} has no table"):
                result.to_pandas()
        elif type(result).to_pandas is Result.to_pandas:
            columns, rows = table
            frame = result.to_pandas()
            assert list(frame.columns) == [column.name for column in columns]
            assert len(frame) == len(list(rows))


def test_a_model_whose_graph_is_deep_can_be_copied(tmp_path):
    # `copy.deepcopy` of the nodes follows each to the next, which is more than Python's recursion limit
    net = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(150)]).eval()
    file = tmp_path / "deep.onnx"
    htp_export.export(net, (x(1, 2),), file, dynamo=False, verbose=False)
    tagged = htp_export.load(file)
    copied = copy.deepcopy({"tagged": tagged, "again": tagged})
    assert copied["tagged"] is copied["again"]
    assert copied["tagged"].model is not tagged.model
    assert copied["tagged"].paths == tagged.paths


@pytest.mark.parametrize("name", RESULTS)
def test_a_module_that_a_result_does_not_have_is_an_error_with_the_nearest(name, made):
    for result in made[name]:
        modules = getattr(result, "modules", None)
        if isinstance(modules, dict) and modules:
            path = max(modules, key=len)
            assert isinstance(modules, Modules)
            assert len(repr(modules)) <= MOST
            with pytest.raises(
                UnknownModuleError, match="no module .* in this result" + f".*{path!r}" * bool(path)
            ):
                modules[f"{path}9"]


def test_every_result_by_module_is_among_them(made):
    by_module = {
        name
        for name, found in made.items()
        if isinstance(getattr(found[0], "modules", None), Modules)
    }
    assert {
        "Cost",
        "Profile",
        "Comparison",
        "Verification",
        "Quantized",
        "Pruned",
        "Placed",
        "ModelMap",
    } <= by_module


def test_numbers_of_modules_are_found_by_name_in_every_table(made):
    [cost, *_] = made["Cost"]
    assert cost.by_path() == cost.by_path("flops")
    assert cost.by_path()["first"] == 2 * 2 * 32 * 32
    assert made["Quantized"][0].by_path("bytes_before")["first"] == 4 * 33 * 32
    with pytest.raises(
        InputError, match=r"modules of Cost have no number 'flop'; there are .*flops"
    ):
        cost.by_path("flop")


@dataclass(frozen=True)
class Counted(ModuleTable):
    """Numbers of modules."""

    columns = (Column("count", "count"),)
    modules: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """A long one."""
        return "many " * 1000


def test_a_long_table_in_a_notebook_and_a_long_summary_at_a_prompt_are_cut():
    counted = Counted({f"fc.{k}": SimpleNamespace(path=f"fc.{k}", count=k) for k in range(2000)})
    assert len(repr(counted)) < MOST
    assert repr(counted.modules) == "<2000 modules: 'fc.0', 'fc.1', 'fc.2', …>"
    assert counted._repr_html_().count("<tr>") == 401
    assert "and 1600 more lines" in counted._repr_html_()
    assert counted.by_path("count")["fc.3"] == 3


# --- every table says the same of a module, on files of every kind ---


class Folded(Holding, conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), act=nn.ReLU()):
    """A convolution into which a batch normalisation is folded: 216 + 8 and 8 + 8 parameters, 224 weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.norm(self.conv(x)))
        return out


class Mlp(Holding, up=nn.Linear(8, 16), down=nn.Linear(16, 8)):
    """8 · 16 + 16 and 16 · 8 + 8 parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


class Tied(nn.Module):
    """A module that runs twice and has two names, a head tied to the embedding, and a layer that never runs.

    160 + 280 + 16 + 9 parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.norm = nn.Embedding(20, 8), Mlp(), nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.again, self.unused = self.mlp, nn.Linear(2, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        h = h + self.mlp(h)
        out: torch.Tensor = self.head(self.norm(h + self.again(h)))
        return out


class Branches(Holding, high=nn.Linear(4, 4), low=nn.Linear(4, 4)):
    """One layer in each branch: 2 · (16 + 4) parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.cond(
            x.sum() > 0, lambda x: self.high(x), lambda x: self.low(x), (x,)
        )
        return out


IMAGE = {"x": x(1, 3, 6, 6)}
IDS = {"ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])}
NETS: dict[str, tuple[type[nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "folded": (Folded, lambda: IMAGE),
    "tied": (Tied, lambda: IDS),
    "branches": (Branches, lambda: {"x": x(2, 4)}),
}


def file_of(name: str, exporter: str = "dynamo") -> onnx.ModelProto:
    """The file of a net, which is exported once."""
    with tempfile.TemporaryDirectory() as folder:
        return onnx.load(exported_once(*NETS[name], exporter, Path(folder))[1])


def without(key: str, model: Any) -> ir.Model:
    """A model without one key of its metadata."""
    made = htp_export.load(model).model
    made.metadata_props.pop(key)
    return made


def with_nodes_of_no_module(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.node[0].metadata_props[:]
    return model


def without_tags(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        del node.metadata_props[:]
    for proto in (model, *model.graph.node):
        del proto.metadata_props[:]
    return model


def carried(model: onnx.ModelProto) -> ir.Model:
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for node in bare.graph.node:
        del node.metadata_props[:]
        node.name = ""
    return htp_export.carry(model, bare).model


def int8(model: onnx.ModelProto, **options: Any) -> ir.Model:
    """Quantized by what one image gives, with one scale and one zero point for each channel."""
    name = model.graph.input[0].name
    return quantize_static(
        model, data=[{name: IMAGE["x"].numpy()}], per_channel=True, **options
    ).model


def functions(model: onnx.ModelProto) -> ir.Model:
    return htp_export.functions(model, "mlp").model


def optimised(model: onnx.ModelProto) -> ir.Model:
    return htp_export.optimize(model).model


def operator_format() -> Any:
    from onnxruntime.quantization import QuantFormat

    return QuantFormat.QOperator


FLOATS = {"float32": 4 * 224}
TEXT = 160 + 280 + 16 + 9
TEXT_WEIGHTS = (
    160 + 160 + 280 + 16
)  # the embedding is there twice, once turned for the head; nothing reads the unused layer
TEXT_FLOATS = {"float32": 4 * TEXT_WEIGHTS}
# For each channel a scale and a zero point, of the weight and of the bias.
SCALES = {"int8": 216 + 8, "int32": 4 * (8 + 8), "float32": 4 * (8 + 8)}
OPERATORS = {"int8": 216 + 8, "int32": 4 * 8, "float32": 4 * 8}
DYNAMIC = {"uint8": 160, "int8": 128 + 128 + 160, "float32": 4 * (16 + 8 + 16)}

# What makes a file, and the parameters and the bytes of weights, by element type, of the whole model.
KINDS: dict[str, tuple[Callable[[], Any], int, dict[str, int]]] = {
    "dynamo": (lambda: file_of("folded"), 240, FLOATS),
    "torchscript": (lambda: file_of("folded", "torchscript"), 240, FLOATS),
    "unknown_parameters": (lambda: without(tags.PARAMETERS, file_of("folded")), 224, FLOATS),
    "nodes_of_no_module": (lambda: with_nodes_of_no_module(file_of("folded")), 240, FLOATS),
    "torchs_scopes": (lambda: without_tags(file_of("folded", "torchscript")), 224, FLOATS),
    "no_tags": (lambda: without_tags(file_of("folded")), 224, FLOATS),
    "float16": (lambda: float16(file_of("folded")).model, 240, {"float16": 2 * 224}),
    "int8": (lambda: int8(file_of("folded")), 240, SCALES),
    "int8_operators": (
        lambda: int8(file_of("folded"), quant_format=operator_format()),
        240,
        OPERATORS,
    ),
    "int8_unknown_parameters": (
        lambda: without(tags.PARAMETERS, int8(file_of("folded"))),
        256,
        SCALES,
    ),
    "extracted": (
        lambda: htp_export.extract(file_of("tied"), "mlp").model,
        280,
        {"float32": 4 * 280},
    ),
    "tied_dynamo": (lambda: file_of("tied"), TEXT, TEXT_FLOATS),
    "tied_torchscript": (lambda: file_of("tied", "torchscript"), TEXT, TEXT_FLOATS),
    "tied_optimised": (lambda: optimised(file_of("tied", "torchscript")), TEXT, TEXT_FLOATS),
    "carried": (lambda: carried(file_of("tied")), TEXT, TEXT_FLOATS),
    "dynamic_int8": (lambda: quantize_dynamic(file_of("tied")).model, TEXT, DYNAMIC),
    "functions": (lambda: functions(file_of("tied")), TEXT, TEXT_FLOATS),
    "branches": (lambda: file_of("branches"), 40, {"float32": 160}),
    "foreign_function": (lambda: with_function(), 16, {"float32": 64}),
}
ALWAYS = (
    "dynamo",
    "no_tags",
    "int8",
    "tied_torchscript",
    "carried",
    "functions",
    "branches",
    "foreign_function",
)


@dataclass(frozen=True)
class Row:
    """What one table says of a module; None for what it does not say."""

    class_name: str
    fate: str | None = None
    calls: int | None = None
    nodes: int | None = None
    own_nodes: int | None = None
    parameters: int | None = None
    total_bytes: int | None = None


def tables(model: Any) -> Iterator[tuple[str, dict[str, Row]]]:
    """The name of each table, and its rows by module path."""
    tagged = read_flat(model)
    rows = tree_rows(tagged).rows
    yield (
        "tree",
        {
            r.path: Row(r.class_name, r.fate, r.calls, r.nodes, r.own_nodes, r.parameters)
            for r in rows
        },
    )
    yield (
        "cost",
        {
            path: Row(
                m.class_name, m.fate, m.calls, m.nodes, m.self_nodes, m.parameters, m.weight_bytes
            )
            for path, m in htp_export.cost(model).modules.items()
        },
    )
    found = htp_export.diff(model, model)
    for side in ("before", "after"):
        states = {path: getattr(module, side) for path, module in found.modules.items()}
        yield (
            f"diff, {side}",
            {
                path: Row(m.class_name, m.fate, None, m.nodes, None, m.parameters, m.weight_bytes)
                for path, m in states.items()
            },
        )
    inventory = take_inventory(tagged)
    yield (
        "view",
        {
            m["path"]: Row(
                m["class"],
                m["fate"],
                m["calls"],
                m["nodes"],
                len(m["own"]),
                m["parameters"],
                m["bytes"],
            )
            for m in page_data(inventory)["modules"]
        },
    )
    if tagged.source != "none":
        measured = htp_export.profile(model, runs=1, warmup=0).modules
        yield "profile", {path: Row(m.class_name, None, m.calls) for path, m in measured.items()}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ALWAYS else [pytest.mark.slow]) for kind in KINDS],
)
def test_every_table_says_the_same_of_every_module_and_this_of_the_whole(kind):
    make, parameters, weight_bytes = KINDS[kind]
    made = make()
    found = dict(tables(made))
    expected = found["cost"]
    for table, rows in found.items():
        assert list(rows) == list(expected), table
        for path, row in rows.items():
            said = {name: number for name, number in vars(row).items() if number is not None}
            assert said == {name: vars(expected[path])[name] for name in said}, f"{table}: {path!r}"
    whole = htp_export.cost(made).modules[""]
    assert whole.parameters == parameters
    assert whole.weight_bytes_by_dtype == weight_bytes
    assert {
        dtype: size
        for dtype, (_, size) in htp_export.diff(made, made).modules[""].weight_bytes.items()
    } == dict(sorted(weight_bytes.items()))


def test_parameters_are_those_of_pytorch_where_the_file_says_what_they_were():
    for name, model in (("folded", Folded()), ("tied", Tied())):
        rows = {row.path: row.parameters for row in tree_rows(htp_export.load(file_of(name))).rows}
        assert rows == {
            path: sum(parameter.numel() for parameter in module.parameters())
            for path, module in model.named_modules()
        }


def test_parameters_are_the_weights_that_are_read_where_the_file_does_not_say():
    for file in (file_of("tied"), file_of("tied", "torchscript")):
        rows = {
            row.path: row.parameters
            for row in tree_rows(htp_export.load(without(tags.PARAMETERS, file))).rows
        }
        assert rows == {
            "": TEXT_WEIGHTS,
            "embed": 160,
            "mlp": 280,
            "mlp.up": 144,
            "mlp.down": 136,
            "norm": 16,
            "head": 160,
            "unused": 0,
        }


def test_nodes_of_no_module_are_the_roots_own_in_every_table():
    made = with_nodes_of_no_module(file_of("folded"))
    rows = {row.path: row for row in tree_rows(htp_export.load(made)).rows}
    assert (rows[""].nodes, rows[""].own_nodes) == (2, 1)
    assert (rows["conv"].nodes, rows["act"].nodes) == (0, 1)


def test_quantized_weights_of_16_bits_are_weights_and_other_integers_are_not():
    weight = ir.Value(name="w", const_value=ir.tensor([1, 2, 3], dtype=ir.DataType.INT16, name="w"))
    places = ir.Value(name="p", const_value=ir.tensor([0, 1], dtype=ir.DataType.INT16, name="p"))
    scale = ir.Value(name="s", const_value=ir.tensor(0.5, name="s"))
    metadata = {tags.MODULE: "fc"}
    restored = ir.node("DequantizeLinear", [weight, scale], metadata_props=metadata)
    result = ir.node("Identity", [places], metadata_props=metadata)
    made = [restored, result]
    outputs = [restored.outputs[0], result.outputs[0]]
    graph = ir.Graph(
        [], outputs, nodes=made, initializers=[weight, places, scale], opset_imports={"": 21}
    )
    model = ir.Model(graph, ir_version=10)
    assert htp_export.cost(model).modules["fc"].weight_bytes == 6
