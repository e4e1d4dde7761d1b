"""Every module of every net, and of small transformers models, is in the file exactly what PyTorch computed."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from tests.exporting import exported, exported_net, of_type, quick
from tests.nets import EXPORTERS, NETS, Apply, Holding, Net, Truth, spread, x
from tests.truth import (
    Judge,
    constants_of,
    inexact,
    named_wrongly,
    nodes_of,
    owners_of,
    tree_of,
    untagged,
    work_of,
)

OWN = ("Gemm", "MatMul", "Conv", "Sigmoid", "Tanh", "Relu")

# Faults that are known, each with its reason.
KNOWN: dict[tuple[str, str], str] = {}


def cases() -> list[Any]:
    """Each net with each exporter; one of both is slow where nothing is known of a single exporter."""
    found = []
    for number, (name, net) in enumerate(NETS.items()):
        both = [exporter for exporter in EXPORTERS if exporter not in net.skip]
        known = [exporter for exporter in both if getattr(net, exporter) != Truth()]
        quick_ones = known or [both[number % len(both)]]
        for exporter in both:
            reason = KNOWN.get((name, exporter))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            marks += [] if exporter in quick_ones else [pytest.mark.slow]
            found.append(pytest.param(net, exporter, marks=marks, id=f"{name}-{exporter}"))
    return found


def different_facts(net: Net, exporter: str, file: onnx.ModelProto) -> list[Any]:
    """``(what, expected, found)`` for each hand-written fact that the file contradicts."""
    facts, tree = net.facts(exporter), tree_of(file)
    compared: list[Any] = [(path, fate, tree[path]["fate"]) for path, fate in facts.fates.items()]
    compared += [
        (path, others, tuple(tree[path].get("with", ()))) for path, others in facts.merged.items()
    ]
    for op_type, owners in facts.owners.items():
        compared.append(
            (
                op_type,
                owners,
                [owners_of(node) for node in nodes_of(file) if node.op_type == op_type],
            )
        )
    return [(what, expected, found) for what, expected, found in compared if expected != found]


@pytest.mark.parametrize(("net", "exporter"), cases())
def test_every_module_is_exact_and_agrees_with_what_is_known_of_it(net, exporter, shared_files):
    judge = Judge(*net.build(), shared_files.read(net.name, exporter))
    assert (judge.faults(), different_facts(net, exporter, judge.file)) == ([], [])
    if net.name != "calls_itself":  # hooks count its calls from the innermost
        values = {**constants_of(judge.file), **judge.opened[0].values}
        assert [*named_wrongly(judge.runs[0][0], judge.file, values)] == []


# torch converts these to opset 14; a graph with LayerNormalization, say, it leaves at 18.
OLD_OPSET = (
    "siblings",
    "mask_made_in_every_layer",
    "called_twice",
    "nested_sequentials",
    "transposes_that_cancel",
)
NOT_OPTIMISED = (
    "written_by_a_part",
    "conv_bn_relu",
    "mask_made_in_every_layer",
    "lstm",
    "reshapes_that_meet",
)
NOT_FOLDED = (
    *(
        "siblings",
        "conv_bn_relu",
        "mask_made_in_every_layer",
        "called_twice",
        "lstm",
        "dict_of_tuples",
    ),
    *("positions_folded_away", "reshapes_that_meet", "weight_norm", "gru"),
)


@pytest.mark.parametrize(
    "name", quick(OLD_OPSET, "mask_made_in_every_layer", "transposes_that_cancel")
)
def test_an_opset_below_18_under_dynamo_is_as_exact(name, tmp_path):
    file = exported_net(name, "dynamo", tmp_path, opset_version=14)
    assert [entry.version for entry in file.opset_import if not entry.domain] == [14]
    assert inexact(*NETS[name].build(), file) == []


@pytest.mark.parametrize(
    "name", quick(NOT_OPTIMISED, "written_by_a_part", "conv_bn_relu", "reshapes_that_meet")
)
def test_a_graph_that_is_not_optimised_is_as_exact(name, tmp_path):
    file = exported_net(name, "dynamo", tmp_path, optimize=False)
    assert inexact(*NETS[name].build(), file) == []


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_torchscript_without_constant_folding_is_as_exact(name, tmp_path):
    file = exported_net(name, "torchscript", tmp_path, opset_version=14, do_constant_folding=False)
    assert inexact(*NETS[name].build(), file) == []


EQUAL = ("nested_sequentials", "two_parents", "conv_bn_relu")


@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        itertools.product(EQUAL, EXPORTERS),
        ("conv_bn_relu", "dynamo"),
        *((name, "torchscript") for name in EQUAL),
    ),
)
def test_parameters_that_are_all_equal_do_not_confuse_owners(
    name, exporter, shared_files, tmp_path
):
    model, kwargs = NETS[name].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    file = exported(model, kwargs, exporter, tmp_path)
    assert work_of(file, *OWN) == work_of(shared_files.read(name, exporter), *OWN) != []


# --- transformers ---------------------------------------------------


SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**SIZE, "vocab_size": 32, "max_position_embeddings": 16},
    "gpt2": {
        "vocab_size": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
        "use_cache": False,
    },
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    },
    "t5": {
        "vocab_size": 32,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "use_cache": False,
    },
    "vit": {**SIZE, "image_size": 16, "patch_size": 8},
}


def small(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of a type of transformers, and inputs whose last tokens are masked."""
    torch.manual_seed(0)
    model, kwargs = of_type(name, **MODELS[name])
    if name == "t5":
        # torch fails to decompose what it computes with sdpa
        model.set_attn_implementation("eager")
    for key, value in changes.items():
        setattr(model.config, key, value)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"][:, -2:] = 0
    return model.eval(), kwargs


@pytest.mark.parametrize(
    ("name", "spread_apart", "exporter"),
    quick(
        # Without new values not resnet: a batchnorm with fresh statistics gives back what it is given.
        [
            (*case, exporter)
            for case in [*((name, True) for name in MODELS), ("bert", False)]
            for exporter in EXPORTERS
        ],
        ("bert", True, "dynamo"),
        ("t5", True, "torchscript"),
    ),
)
def test_small_transformers_models_are_exact(name, spread_apart, exporter, tmp_path):
    model, kwargs = small(name)
    model = spread(model).eval() if spread_apart else model
    file = exported(model, kwargs, exporter, tmp_path)
    assert untagged(file) == []
    assert inexact(Tensors(model), kwargs, file) == []


class Tensors:
    """A transformers model, seen as one that gives back a tuple; to PyTorch's hooks nothing has changed."""

    def __init__(self, model: nn.Module) -> None:
        self.named_modules = model.named_modules
        self._call: Callable[..., Any] = functools.partial(model, return_dict=False)

    def __call__(self, **kwargs: Any) -> Any:
        return self._call(**kwargs)


# --- the judge itself ---------------------------------------------------


def retag(file: onnx.ModelProto, op_type: str, owner: str, nth: int = 0) -> None:
    node = [node for node in file.graph.node if node.op_type == op_type][nth]
    del node.metadata_props[:]
    node.metadata_props.add(key="htp.module", value=owner)


def declare(file: onnx.ModelProto, path: str, fate: str, others: tuple[str, ...] = ()) -> None:
    import json

    tree = tree_of(file)
    tree[path] |= {"fate": fate, "with": list(others)}
    entry = next(entry for entry in file.metadata_props if entry.key == "htp.modules")
    entry.value = json.dumps(tree)


def test_the_judge_sees_nodes_of_other_modules_and_of_none(shared_files):
    file = shared_files.read("siblings", "dynamo")
    retag(file, "Tanh", "second")
    assert [path for path, _ in inexact(*NETS["siblings"].build(), file)] == ["second"]
    retag(file, "Gemm", "second", 0)
    retag(file, "Gemm", "first", 1)
    del file.graph.node[-1].metadata_props[:]
    assert {path for path, _ in inexact(*NETS["siblings"].build(), file)} == {"", "first", "second"}


@pytest.mark.parametrize(
    ("net", "path", "fate", "others"),
    [
        ("siblings", "first", "dead", ()),
        ("siblings", "first", "constant", ()),
        ("siblings", "first", "identity", ()),
        ("siblings", "first", "uncalled", ()),
        ("siblings", "first", "fused", ("second",)),
        ("conv_bn_relu", "0", "computed", ()),
        ("conv_bn_relu", "0", "fused", ("3",)),
        ("conv_bn_relu", "0", "fused", ()),
        ("dead_branch_and_unused_module", "unused", "dead", ()),
        ("dead_branch_and_unused_module", "dead.0", "uncalled", ()),
    ],
)
def test_the_judge_sees_a_false_fate(net, path, fate, others, shared_files):
    file = shared_files.read(net, "dynamo")
    declare(file, path, fate, others)
    assert [where for where, _ in inexact(*NETS[net].build(), file)] == [path]


@pytest.mark.parametrize("read", [True, False])
def test_the_judge_finds_out_whether_an_expanded_result_is_read(read, tmp_path):
    class Holds(Holding, expands=Apply(lambda x: (x.cos(), x.mean(0).expand(2, 4)))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.expands(x)
            return first * second if read else first

    model = Holds()
    file = exported(model, {"x": x(2, 4)}, "torchscript", tmp_path)
    assert inexact(model, {"x": x(2, 4)}, file) == []
    for node in file.graph.node:  # as if the second result were the work of the caller
        if node.op_type in ("ReduceMean", "Expand"):
            next(entry for entry in node.metadata_props if entry.key == "htp.module").value = ""
    faults = [("expands", "output 1 of call 0 is not made in its region")] if read else []
    assert [
        fault for fault in inexact(model, {"x": x(2, 4)}, file) if "output" in fault[1]
    ] == faults
