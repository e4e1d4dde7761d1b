"""Graphs by one chosen way: concrete arguments of torch.fx, and models that break into many graphs."""

import sys
import time

import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError


class Choosing(nn.Module):
    """A model whose arguments decide which modules run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mode: int | None = None, *, twice: bool = False):
        if mode is not None and mode > 2:
            x = self.first(x)
        return self.second(x) if twice else x.relu()


def test_conditions_on_concrete_arguments_are_no_hindrance_to_symbolic_tracing():
    model, x = Choosing().eval(), torch.randn(2, 4)
    kwargs = {"mode": 3, "twice": True}
    with pytest.raises(InputError, match="cannot be used as inputs to control flow"):
        htp_export.inspect(model, x, kwargs=kwargs, way="torch.fx")
    inspected = htp_export.inspect(model, x, kwargs=kwargs, way="torch.fx", concrete_args=kwargs)
    owners = [(n.op_type, n.metadata_props["htp.module"]) for n in inspected.model.graph]
    assert owners == [("linear", "first"), ("linear", "second")]
    # two products of 2 x 4 x 4, as torch counts them
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(x, **kwargs)
    assert htp_export.cost(inspected).modules[""].flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concrete_args": {"modus": 3}}, "no parameter 'modus'; it has x, mode, twice"),
        ({"concrete_args": {"mode": 3}, "way": "dynamo"}, "the way is dynamo"),
        ({"way": "fx"}, "way 'fx' is none of onnx, torch.export, torch.fx, dynamo, parts"),
        # the model runs with another value than the conditions had
        ({"concrete_args": {"mode": 3, "twice": True}, "way": "torch.fx"}, "torch.fx stopped"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        htp_export.inspect(Choosing().eval(), torch.randn(2, 4), **options)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.fc(x)))


class Timed(nn.Module):
    """Seven blocks and a head, with calls of Python between them that Dynamo does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(7))
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                time.time()
            else:
                sys.intern(f"block {number}")
        return self.head(x)


@pytest.mark.long
def test_a_model_in_eight_graphs_lists_them_and_its_page_draws_all_connected():
    model, x = Timed().eval(), torch.randn(2, 4)
    inspected = htp_export.inspect(model, x, way="dynamo")
    assert list(inspected.graphs) == [f"graph_{number}" for number in range(1, 9)]
    first = inspected.parts[0]
    assert (first.name, first.module, first.nodes, first.runs) == ("graph_1", "head", 4, 1)
    assert sum(part.share for part in inspected.parts) == pytest.approx(1)
    text = str(inspected).splitlines()
    assert text[0].endswith("; 8 graphs, graph_1 with 16.0% of the nodes")
    assert "graph_2 of blocks.0: 3 nodes" in text
    assert inspected.to_dict()["parts"][1]["module"] == "blocks.0"
    # connected: the only input is the user's, each block reads the one before it, and parameters have their names
    (only_input,) = inspected.model.graph.inputs
    ops = [node.op_type for node in inspected.model.graph]
    assert ops[:4] == ["linear", "layer_norm", "relu", "linear"]
    produced = [node.inputs[0].producer() for node in inspected.model.graph]
    assert sum(producer is None for producer in produced) == 1
    assert only_input is next(iter(inspected.model.graph)).inputs[0]
    assert "all 8 graphs" in htp_export.view(inspected).html


@pytest.mark.long
def test_parameters_that_dynamo_makes_inputs_count_for_their_modules():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    model = transformers.CLIPVisionModel(config).eval()
    check_parameters(model, torch.randn(1, 3, 32, 32))


@pytest.mark.slow
def test_parameters_of_the_vision_model_of_clip_count_for_their_modules():
    transformers = pytest.importorskip("transformers")
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(patch_size=16)).eval()
    assert check_parameters(model, torch.randn(1, 3, 224, 224)) == 85_799_424


def check_parameters(model: nn.Module, x: torch.Tensor) -> int:
    """Compare parameters and weights of every module with PyTorch; return the whole."""
    inspected = htp_export.inspect(model, kwargs={"pixel_values": x}, way="dynamo")
    modules = htp_export.cost(inspected).modules
    for path, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters())
        assert modules[path].parameters == size, path
        # each parameter is an initializer that the nodes of its module read
        assert modules[path].weight_bytes >= 4 * size, path
    assert set(dict(model.named_parameters())) <= set(inspected.model.graph.initializers)
    assert [value.shape for value in inspected.model.graph.inputs] == [list(x.shape)]
    return modules[""].parameters
