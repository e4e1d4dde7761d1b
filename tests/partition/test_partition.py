"""Stages of a model compute what the whole does, each node and weight in one of them."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.partition.balancing import balanced_cuts
from htp_export.errors import InputError, UnknownModuleError
from tests import handmade
from tests.exporting import of_type, open_sizes, tiny_bert
from tests.extract.test_cutting import exact, exported_to, run_file
from tests.extract.test_splicing import feeds_of
from tests.handmade import tagged_node, value, weight
from tests.nets import EXPORTERS, NETS, Holding, spread, x

Inputs = dict[str, torch.Tensor]


def agree(file: Path, found: htp_export.results.Partition, inputs: dict[str, Any]) -> bool:
    chained = found.run(inputs, session_options=exact())
    names = [output.name for output in onnx.load(file, load_external_data=False).graph.output]
    return names == list(chained) and all(
        map(np.array_equal, run_file(file, inputs), chained.values())
    )


def bert() -> tuple[nn.Module, Inputs]:
    return tiny_bert(4)


def ids() -> torch.Tensor:
    return tiny_bert(1)[1]["input_ids"]


def gpt2() -> tuple[nn.Module, Inputs]:
    """Its output layer is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1000, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return GPT2LMHeadModel(config), {"input_ids": ids()}


def resnet() -> tuple[nn.Module, Inputs]:
    settings = {
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 16],
        "depths": [1, 2, 1],
        "layer_type": "basic",
    }
    return of_type("resnet", **settings)[0], {"pixel_values": x(1, 3, 32, 32)}


def t5() -> tuple[nn.Module, Inputs]:
    """The first layer's position bias is used by all layers."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2)
    return T5EncoderModel(config), {
        "input_ids": ids(),
        "attention_mask": torch.ones(1, 8, dtype=torch.long),
    }


MODELS = {
    "bert-dynamo": bert,
    "bert-torchscript": bert,
    "gpt2-dynamo": gpt2,
    "resnet-dynamo": resnet,
    "resnet-torchscript": resnet,
    "t5-torchscript": t5,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a model of the table above, and its inputs; exported once."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            torch.manual_seed(0)
            model, kwargs = MODELS[name]()
            file = tmp_path_factory.mktemp(name) / "model.onnx"
            exporter = name.split("-")[1]
            names = {"input_names": list(kwargs)} if exporter == "torchscript" else {}
            exported_to(file, spread(model).eval(), kwargs, exporter, **names)
            made[name] = file, feeds_of(file, kwargs)
        return made[name]

    return get


# --- stages of real models --------------------------------------------------------------------------------


QUICK = {("gpt2-dynamo", 3), ("resnet-torchscript", 4), ("t5-torchscript", 3)}
"""What every run tries; the others are tried with -m slow."""
SWEEP = [
    pytest.param(name, count, marks=() if (name, count) in QUICK else pytest.mark.slow)
    for name, count in itertools.product(MODELS, (2, 3, 4))
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "count"), SWEEP)
def test_stages_agree_with_the_whole_and_are_valid_models(exported, name, count, tmp_path):
    file, inputs = exported(name)
    found = htp_export.partition(file, count, tmp_path / "stages")
    for stage in found.stages:
        onnx.checker.check_model(str(stage.file), full_check=True)
    assert [stage.file.name for stage in found.stages if stage.file] == [
        f"stage{k}.onnx" for k in range(count)
    ]
    assert agree(file, found, inputs)


def is_many_floats(value: ir.Value | None) -> bool:
    """Whether a tensor may be no cheap constant or size."""
    floats = value is not None and value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return floats and (value.shape is None or any(size != 1 for size in value.shape))


@pytest.mark.parametrize(("name", "count"), SWEEP)
def test_every_weight_and_every_node_is_in_one_stage_and_tensors_flow_forward(
    exported, name, count
):
    whole = htp_export.load(exported(name)[0])
    found = htp_export.partition(whole, count)
    graphs = [stage.model.graph for stage in found.stages if stage.model]
    held = [
        each.name
        for graph in graphs
        for each in graph.initializers.values()
        if is_many_floats(each)
    ]
    there = whole.model.graph.initializers
    assert sorted(held) == sorted(each.name for each in there.values() if is_many_floats(each))
    assert sum(stage.parameter_bytes for stage in found.stages) == sum(
        each.const_value.nbytes for each in there.values()
    )
    made = [output.name for graph in graphs for node in graph for output in node.outputs]
    assert {output.name for node in whole.model.graph for output in node.outputs} <= set(made)
    repeated = {each for each in made if made.count(each) > 1}
    assert [each for each in repeated if is_many_floats(whole.typed.get(each))] == []
    for number, stage in enumerate(found.stages):
        assert all(source is None or source < number for source in stage.sources.values())
        for key, source in stage.sources.items():
            assert key in (found.inputs if source is None else found.stages[source].outputs)
    listed = {
        (each.made_by, each.name, reader) for each in found.crossing for reader in each.read_by
    }
    wanted = {
        (s, key, k)
        for k, stage in enumerate(found.stages)
        for key, s in stage.sources.items()
        if s is not None
    }
    assert listed == wanted


@pytest.mark.parametrize("name", ["bert-torchscript", "gpt2-dynamo"])
def test_stages_are_runs_of_whole_modules_with_their_tags_and_their_part_of_the_tree(
    exported, name
):
    whole = htp_export.load(exported(name)[0])
    found, whole_cost = htp_export.partition(whole, 3), htp_export.cost(whole)
    modules = [path for stage in found.stages for path in stage.modules]
    assert len(set(modules)) == len(modules) > 3
    # these run in the order in which they are registered
    assert modules == sorted(modules, key=whole.paths.index)
    for stage in found.stages:
        part = htp_export.load(stage.model)
        assert part.untagged == []
        assert part.hierarchy.root.class_name == whole.hierarchy.root.class_name
        for path in stage.modules:
            below = [each for each in whole if each == path or each.startswith(path + ".")]
            assert [part.hierarchy[each] for each in below] == [
                whole.hierarchy[each] for each in below
            ]
        others = {path for other in found.stages if other is not stage for path in other.modules}
        assert not others & set(part)
        assert (
            htp_export.cost(part).modules[stage.modules[-1]].flops
            == whole_cost.modules[stage.modules[-1]].flops
        )


@pytest.mark.parametrize(
    "exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)]
)
def test_dynamic_sizes_stay_dynamic(exporter, tmp_path):
    model, kwargs = bert()
    kwargs = {name: tensor.repeat(2, 1) for name, tensor in kwargs.items()}
    sizes = open_sizes(exporter, **{name: {0: "batch", 1: "length"} for name in kwargs})
    file = exported_to(tmp_path / "model.onnx", model, kwargs, exporter, **sizes)
    inputs = {name: tensor[:, :5].repeat(2, 1).numpy() for name, tensor in kwargs.items()}
    found = htp_export.partition(file, 3)
    assert agree(file, found, inputs)
    hidden = [
        each.tensor.shape
        for each in found.crossing
        if each.tensor.shape and each.tensor.shape[-1] == 16
    ]
    assert hidden
    assert not any(isinstance(size, int) for shape in hidden for size in shape[:2])


# --- where stages begin -----------------------------------------------------------------------------------


def test_stages_begin_at_the_named_modules_in_whatever_order_they_are_named(exported):
    file, inputs = exported("bert-torchscript")
    found = htp_export.partition(file, ["encoder.layer.3", "encoder.layer.1"])
    assert [stage.modules for stage in found.stages] == [
        ("embeddings", "encoder.layer.0"),
        ("encoder.layer.1", "encoder.layer.2"),
        ("encoder.layer.3", "pooler"),
    ]
    assert agree(file, found, inputs)
    first, second = htp_export.partition(file, ["embeddings", "encoder"]).stages
    assert (first.modules, second.modules) == (("embeddings",), ("encoder", "pooler"))
    assert (dict(first.sources), second.sources["attention_mask"]) == ({"input_ids": None}, None)


def chain(*widths: int) -> nn.Module:
    """Linear layers, each of its own size."""
    return spread(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))).eval()


def exported_chain(*widths: int) -> Any:
    return htp_export.export(chain(*widths), (x(1, widths[0]),), verbose=False)


def test_one_stage_is_the_whole_and_layers_stay_whole_where_that_costs_little(exported):
    [whole] = htp_export.partition(exported("bert-torchscript")[0], 1).stages
    assert (whole.modules, set(whole.sources.values())) == (("",), {None})
    found = htp_export.partition(exported("bert-torchscript")[0], 5)
    assert [stage.modules[0] for stage in found.stages] == [
        "embeddings",
        *(f"encoder.layer.{k}" for k in range(4)),
    ]


@pytest.mark.long
def test_what_has_no_parameters_and_what_lies_inside_a_heavy_layer_can_be_cut_too():
    light = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Softplus()).eval()
    found = htp_export.partition(htp_export.export(light, (x(1, 4),), verbose=False), 3)
    assert [stage.modules for stage in found.stages] == [("0",), ("1",), ("2",)]
    net = nn.Sequential(nn.Linear(4, 4), chain(4, 64, 64, 64, 64))
    program = htp_export.export(spread(net).eval(), (x(1, 4),), verbose=False)
    found = htp_export.partition(program, 3)
    assert [stage.modules for stage in found.stages] == [("0", "1.0", "1.1"), ("1.2",), ("1.3",)]


def test_a_profile_can_be_balanced_by_and_so_can_numbers_of_outer_modules_alone(exported):
    file, inputs = exported("bert-torchscript")
    profile = htp_export.profile(file, inputs, runs=2, warmup=0)
    by_profile = htp_export.partition(file, 2, balance=profile)
    assert (
        by_profile.to_dict() == htp_export.partition(file, 2, balance=profile.by_path()).to_dict()
    )
    by_layers = htp_export.partition(
        file, 2, balance={"encoder.layer.0": 2, "encoder.layer.1": 2, "encoder": 8}
    )
    assert by_layers.stages[1].modules[0] == "encoder.layer.2"


@pytest.mark.long
def test_stages_can_be_balanced_by_flops_if_no_dimension_is_open():
    """The first convolution has few weights and most of the work."""
    net = spread(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(8), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 64, 1))
    ).eval()
    images, batch = x(2, 1, 34, 34), torch.export.Dim("batch")
    program = htp_export.export(net, (images,), verbose=False)
    by_size, by_work = (
        htp_export.partition(program, 2),
        htp_export.partition(program, 2, balance="flops"),
    )
    assert [stage.modules[-1] for stage in by_size.stages] == ["2", "3"]
    assert [stage.modules[-1] for stage in by_work.stages] == ["1", "3"]
    program = htp_export.export(net, (images,), dynamic_shapes=({0: batch},), verbose=False)
    with pytest.raises(
        InputError, match="FLOPs of a model with open dimensions depend on their sizes"
    ):
        htp_export.partition(program, 2, balance="flops")
    cost = htp_export.cost(program, shapes={program.model.graph.inputs[0].name: (4, 1, 34, 34)})
    by_cost = htp_export.partition(program, 2, balance=cost)
    assert [stage.modules for stage in by_cost.stages] == [
        stage.modules for stage in by_work.stages
    ]


# --- what crosses -----------------------------------------------------------------------------------------


def test_a_tied_weight_is_in_the_first_stage_that_reads_it_and_crosses(exported):
    file, inputs = exported("gpt2-dynamo")
    found = htp_export.partition(file, ["transformer.h.0", "transformer.h.1", "lm_head"])
    tied = [each for each in found.crossing if each.tensor.shape == (1000, 16)]
    assert [(each.made_by, each.read_by) for each in tied] == [(0, (3,))]
    holding = [
        stage for stage in found.stages if "lm_head.weight" in stage.model.graph.initializers
    ]
    assert holding == [found.stages[0]]
    assert agree(file, found, inputs)


class Skipping(
    Holding,
    stem=nn.Linear(8, 8),
    layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
    head=nn.Linear(8, 2),
):
    """The input of the first layer is read by the last one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = hidden = self.stem(x).tanh()
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden + kept)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_skip_connection_crosses_from_the_stage_that_makes_it(exporter, tmp_path):
    file = exported_to(tmp_path / "net.onnx", spread(Skipping()).eval(), {"x": x(1, 8)}, exporter)
    found = htp_export.partition(file, ["layers.0", "layers.1", "layers.2"])
    assert [(each.made_by, each.read_by) for each in found.crossing] == [
        (0, (1, 3)),
        (1, (2,)),
        (2, (3,)),
    ]
    assert agree(file, found, feeds_of(file, {"x": x(1, 8, seed=3)}))


def test_small_constants_and_sizes_are_repeated_and_large_ones_cross():
    given, number, table = value("x"), weight("number", 1), weight("table")
    first = tagged_node("Mul", [given, number], "layer.0", "a")
    second = tagged_node("Add", [first.outputs[0], table], "layer.0", "b")
    third = tagged_node("Mul", [second.outputs[0], number], "layer.1", "c")
    fourth = tagged_node("Add", [third.outputs[0], table], "layer.1", "d")
    for node in (second, fourth):
        node.outputs[0].shape = third.outputs[0].shape = ir.Shape([4, 4])
    for each in (given, first.outputs[0]):
        each.shape = ir.Shape([4, 4])
    infos = [
        htp_export.ModuleInfo(path, "net.Net", 1, "computed")
        for path in ("", "layer", "layer.0", "layer.1")
    ]
    made = handmade.model([given], [first, second, third, fourth], [number, table], infos)
    found = htp_export.partition(made, 2)
    assert [list(stage.model.graph.initializers) for stage in found.stages] == [
        ["number", "table"],
        ["number"],
    ]
    assert [each.name for each in found.crossing] == ["table.returned", "b"]
    assert [stage.parameter_bytes for stage in found.stages] == [4 + 64, 0]
    feed = np.arange(16, dtype=np.float32).reshape(4, 4)
    # as handmade.weight has it for "table"
    numbers = (4 + np.arange(16, dtype=np.float32).reshape(4, 4)) + 1
    scale = np.float32(len("number"))
    assert np.array_equal(found.run({"x": feed})["d"], (feed * scale + numbers) * scale + numbers)


def test_a_constant_that_sizes_and_others_read_is_made_once(shared_files, tmp_path):
    """A TorchScript split reads one constant as an index of a shape, and as an axis."""
    name = "an_output_that_nobody_uses"
    file, kwargs = shared_files.net(name, "torchscript"), NETS[name].build()[1]
    found = htp_export.partition(file, 2, tmp_path / "stages")
    for stage in found.stages:
        onnx.checker.check_model(str(stage.file), full_check=True)
    assert agree(file, found, feeds_of(file, kwargs))


def test_shared_work_is_done_once_in_the_first_stage_that_needs_it_and_the_whole_stays_as_it_is():
    whole = handmade.encoder()
    before = ir.to_proto(whole).SerializeToString()
    found = htp_export.partition(whole, ["layer.1"])
    assert ir.to_proto(whole).SerializeToString() == before
    assert [each.name for each in found.crossing] == ["mask", "layer0"]
    assert [stage.modules for stage in found.stages] == [("layer.0",), ("layer.1",)]
    first = htp_export.load(found.stages[0].model)
    assert [first.owners_of(node) for node in first.nodes if node.op_type == "Neg"] == [
        ("layer.0",)
    ]


def test_a_branch_is_in_one_stage_with_what_it_captures(tmp_path):
    given, condition = value("x"), ir.val("condition", ir.DataType.BOOL, [])
    first = tagged_node("Neg", [given], "first", "a")
    yes, no = (
        tagged_node("Add", [given, first.outputs[0]], "gate", "yes"),
        tagged_node("Abs", [given], "gate", "no"),
    )
    gate = tagged_node("If", [condition], "gate", "gated")
    for name, node in (("then_branch", yes), ("else_branch", no)):
        gate.attributes[name] = ir.AttrGraph(
            name, ir.Graph([], list(node.outputs), nodes=[node], name=name)
        )
    last = tagged_node("Exp", [gate.outputs[0]], "last", "out")
    infos = [
        htp_export.ModuleInfo(path, "net.Net", 1, "computed")
        for path in ("", "first", "gate", "last")
    ]
    ir.save(
        handmade.model([given, condition], [first, gate, last], [], infos), tmp_path / "net.onnx"
    )
    found = htp_export.partition(tmp_path / "net.onnx", 3)
    assert [set(stage.inputs) for stage in found.stages] == [
        {"x"},
        {"condition", "x", "a"},
        {"gated"},
    ]
    for way in (True, False):
        assert agree(
            tmp_path / "net.onnx", found, {"x": x(2, 4).numpy(), "condition": np.array(way)}
        )


def test_functions_go_with_the_stages_that_call_them(exported, tmp_path):
    file, inputs = exported("bert-torchscript")
    nested = tmp_path / "nested.onnx"
    htp_export.functions(file, "encoder.layer.*", nested)
    found = htp_export.partition(nested, ["encoder", "pooler"], tmp_path / "stages")
    assert [bool(onnx.load(str(stage.file)).functions) for stage in found.stages] == [
        False,
        True,
        False,
    ]
    assert agree(nested, found, inputs)


def test_a_file_with_torchs_own_scopes_can_be_cut(tmp_path):
    torch.onnx.export(chain(4, 8, 2), (x(1, 4),), tmp_path / "net.onnx", dynamo=True, verbose=False)
    found = htp_export.partition(tmp_path / "net.onnx", 2)
    assert [stage.modules for stage in found.stages] == [("0",), ("1",)]
    assert agree(tmp_path / "net.onnx", found, {"input": x(1, 4).numpy()})


# --- bad input --------------------------------------------------------------------------------------------


class Again(Holding, fc=nn.Linear(4, 4), act=nn.Tanh(), head=nn.Linear(4, 2)):
    """Calls of ``fc`` lie around ``act``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.act(self.fc(x))))


def test_no_stage_begins_inside_a_module_that_runs_again_later_and_borders_are_named():
    program = htp_export.export(spread(Again()).eval(), (x(1, 4),), verbose=False)
    with pytest.raises(
        InputError, match=r"at module 'act': module 'fc' runs before it and after it; stages"
    ):
        htp_export.partition(program, ["act"])
    with pytest.raises(InputError, match=r"into 3 stages; stages can begin before 'head'"):
        htp_export.partition(program, 3)
    assert [stage.modules for stage in htp_export.partition(program, 2).stages] == [
        ("fc", "act"),
        ("head",),
    ]


@pytest.mark.parametrize(
    ("stages", "options", "kind", "message"),
    [
        (0, {}, InputError, "one stage or more, not 0"),
        (True, {}, InputError, "one stage or more, not True"),
        (2, {"slack": -1}, InputError, "slack is a fraction"),
        (2, {"slack": float("nan")}, InputError, "slack is a fraction"),
        (["layer.7"], {}, UnknownModuleError, "nearest: 'layer"),
        (["dropout"], {}, InputError, "'dropout': it has no nodes"),
        ("layer.1", {}, InputError, "a list of modules"),
        (
            ["layer.1", "layer.1.fc"],
            {},
            InputError,
            "'layer.1' and 'layer.1.fc' begin at the same place",
        ),
        (2, {"balance": "bananas"}, InputError, "balanced by 'parameters', 'flops' or"),
        (2, {"balance": {"layer.7": 1.0}}, InputError, "'layer.7', which is not in the model"),
        (2, {"balance": {"layer.0": -1.0}}, InputError, r"'layer.0' has -1\.0"),
        (2, {"balance": {"layer.0": "much"}}, InputError, "'layer.0' has 'much'"),
        (2, {"balance": {"layer.0": 0.0}}, InputError, "all zero"),
        (2, {"balance": 7}, InputError, "not by int"),
        (2, {"serve": "ray"}, InputError, "name an output folder"),
        (
            2,
            {"serve": "torchserve", "output": "out"},
            InputError,
            "partition: no plug-in 'torchserve'",
        ),
    ],
)
def test_what_cannot_be_done_is_said(stages, options, kind, message):
    with pytest.raises(kind, match=message):
        htp_export.partition(handmade.encoder(), stages, **options)


# --- running ----------------------------------------------------------------------------------------------


def test_an_open_runner_runs_again_and_again():
    net = chain(4, 8, 2)
    found = htp_export.partition(htp_export.export(net, (x(1, 4),), verbose=False), 2)
    with found.open() as runner:
        for seed in range(3):
            given = x(1, 4, seed=seed)
            (result,) = runner.run({"input": given}).values()
            assert np.allclose(result, net(given).detach().numpy(), atol=1e-6)


def test_wrong_inputs_and_missing_providers_are_said():
    found = htp_export.partition(exported_chain(4, 8, 2), 2)
    with pytest.raises(InputError, match=r"no input 'inputs'.*nearest: 'input'"):
        found.run({"inputs": np.ones((1, 4), np.float32)})
    with pytest.raises(InputError, match="no NoExecutionProvider"):
        found.run({"input": np.ones((1, 4), np.float32)}, providers=["NoExecutionProvider"])


def test_a_stage_that_does_not_run_is_named(tmp_path):
    found = htp_export.partition(exported_chain(4, 8, 2), 2, tmp_path / "stages")
    (tmp_path / "stages" / "stage1.onnx").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"stage1\.onnx: ONNX Runtime cannot load it"):
        found.run({"input": np.ones((1, 4), np.float32)})


# --- cuts of a chain against all cuts that there are ---------------------------------------------------------


def parts(weights: list[float], cuts: tuple[int, ...] | list[int]) -> list[float]:
    return [sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights)))]


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.5])
def test_cuts_are_the_cheapest_of_those_whose_heaviest_part_is_light_enough(slack):
    draw = random.Random(int(slack * 100))
    for _ in range(300):
        weights = [
            draw.choice([0, 0, 1, 2, 5, draw.random() * 10]) for _ in range(draw.randint(2, 8))
        ]
        places = sorted(draw.sample(range(1, len(weights)), draw.randint(1, len(weights) - 1)))
        charges = [draw.random() / 10 for _ in places]
        count = draw.randint(2, len(places) + 1)
        equal = max(sum(weights) / count, 1e-300)

        def cost(cuts: tuple[int, ...] | list[int]) -> float:
            squares = sum((part / equal) ** 2 for part in parts(weights, cuts))  # noqa: B023 - called in this round
            return squares + sum(charges[places.index(cut)] for cut in cuts)  # noqa: B023

        choices = list(itertools.combinations(places, count - 1))
        lightest = min(max(parts(weights, cuts)) for cuts in choices)
        allowed = [
            cuts for cuts in choices if max(parts(weights, cuts)) <= lightest * (1 + slack) + 1e-9
        ]
        found = balanced_cuts(weights, places, charges, count, slack)
        assert len(found) == count - 1
        assert max(parts(weights, found)) <= lightest * (1 + slack) + 1e-6
        assert cost(found) == pytest.approx(min(map(cost, allowed)))


def test_what_weighs_nothing_stays_with_what_is_before_it():
    assert balanced_cuts([1, 0, 1, 0], [1, 2, 3], [0.0] * 3, 2, 0.0) == [2]
