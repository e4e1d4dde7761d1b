"""What is cut out of a graph computes what the module did."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError
from tests import handmade
from tests.exporting import BOTH, open_sizes
from tests.nets import EXPORTERS, NETS, Holding, spread, x
from tests.truth import equal, run_pytorch
from tools.compare_models import MODELS, build


def exported_to(
    path: Path, model: nn.Module, kwargs: dict[str, Any], exporter: str, **options: Any
) -> Path:
    htp_export.export(
        model, (), path, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False, **options
    )
    return path


def exact() -> ort.SessionOptions:
    """ONNX Runtime that computes what the graph says."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return options


def run_file(path: Path, feeds: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    session = ort.InferenceSession(str(path), exact(), providers=["CPUExecutionProvider"])
    return list(
        session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    )


# Modules that are held against PyTorch elsewhere: hooks and numbers are in no signature.
OTHERWISE = ("calls_itself", "passes_numbers")
# Nets and architectures that every run tries, one for each difficulty of a cut; the others are tried with -m slow.
QUICK = (
    "called_twice", "cells", "lstm", "mask_made_in_every_layer", "nested_inputs", "outside_and_in_a_branch",
    "positions_from_shapes", "reshapes_that_meet", "returned_parts", "tied_weights",
)  # fmt: skip
CASES = [
    pytest.param(
        name, exporter, id=f"{name}-{exporter}", marks=() if name in QUICK else pytest.mark.slow
    )
    for name, net in NETS.items()
    for exporter in EXPORTERS
    if exporter not in net.skip and "hook" not in name and name not in OTHERWISE
]

# Models whose modules are given sizes, or masks that only a trace makes.
WITH_SIZES = ("CLIP", "DETR", "SegFormer-B0", "Swin-T", "Wav2Vec2-base", "YOLOS-tiny")


def wrong_parts(
    model: nn.Module,
    kwargs: dict[str, Any],
    file: Path,
    part: Path,
    *,
    masks: bool = False,
    sizes: bool = False,
) -> list[Any]:
    """The computed modules that, cut out and run on what PyTorch gave them, give something else than they did there.

    While they are traced some models pass masks on that they go without otherwise; ``masks`` says that they may. What a
    call was given is paired with the names of its arguments by order; where there are not as many of both, because
    sizes are tensors in a trace, the call is passed over if ``sizes`` says that there are such.
    """
    tagged, wrong = htp_export.load(file), list[Any]()
    calls, _ = run_pytorch(model, kwargs)
    for path in tagged:
        region = tagged[path]
        if region.fate != "computed" or any(
            node.graph is not tagged.model.graph for node in region.nodes
        ):
            continue
        for nth, call in enumerate(calls.get(path, ())):
            given = (value for node in region.call(nth).nodes for value in node.outputs)
            returned = tagged.signatures[path][nth].outputs
            if tagged.index.constant.issuperset(given) or (
                returned and not any(returned)
            ):  # nothing reads what it gives
                continue
            result = htp_export.extract(tagged, path, part, call=nth)
            ends = (*result.model.graph.inputs, *result.model.graph.outputs)
            if all(value.shape is not None for value in ends):  # some ranks nobody can infer
                onnx.checker.check_model(str(part), full_check=True)
            arguments = tagged.signatures[path][nth].inputs
            known = len(arguments) == len(call.given) or masks
            if sizes and not known:
                continue
            feeds = dict(zip(arguments, call.given, strict=not masks)) if known else {}
            if not result.inputs.keys() <= feeds.keys():
                wrong.append((path, nth, "takes", list(result.inputs)))
                continue
            found = run_file(part, feeds)
            if not found or not all(
                any(equal(one, other) for other in call.returned) for one in found
            ):
                wrong.append((path, nth, "differs"))
    return wrong


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_every_computed_module_gives_alone_what_pytorch_gives(
    name, exporter, shared_files, tmp_path
):
    file = shared_files.net(name, exporter)
    assert wrong_parts(*NETS[name].build(), file, tmp_path / "part.onnx") == []


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_so_does_every_computed_module_of_real_architectures(name, exporter, tmp_path):
    model, kwargs = build(name, "small")
    file = exported_to(tmp_path / "model.onnx", model, kwargs, exporter)
    masks = exporter == "dynamo" and name in ("ViT-B", "DeiT-S")
    assert (
        wrong_parts(
            model, kwargs, file, tmp_path / "part.onnx", masks=masks, sizes=name in WITH_SIZES
        )
        == []
    )


class Scaled(Holding, fc=nn.Linear(4, 4)):
    """Reads the size of what it is given, which dynamo reads from the model's input."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        return self.fc(hidden).reshape(batch * length, 4) * mask.reshape(batch * length, 1)


class Two(Holding, pre=nn.Linear(4, 4), scaled=Scaled()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.pre(x).tanh(), (x > 0).any(-1).float())


@BOTH
def test_sizes_are_read_from_the_modules_own_arguments_and_stay_dynamic(exporter, tmp_path):
    options = open_sizes(exporter, x={0: "batch", 1: "length"})
    model = spread(Two()).eval()
    file = exported_to(tmp_path / "net.onnx", model, {"x": x(2, 3, 4)}, exporter, **options)
    result = htp_export.extract(file, "scaled", tmp_path / "part.onnx")
    hidden, mask = x(5, 7, 4, seed=1), x(5, 7, seed=2)
    (found,) = run_file(tmp_path / "part.onnx", {"hidden": hidden.numpy(), "mask": mask.numpy()})
    assert (list(result.inputs), result.outside) == (["hidden", "mask"], ())
    assert equal(found, model.scaled(hidden, mask).detach().numpy())
    assert not any(isinstance(size, int) for size in result.model.graph.inputs[0].shape[:2])


@BOTH
def test_a_part_keeps_its_tags_its_tree_and_only_its_weights(exporter, shared_files, tmp_path):
    whole = htp_export.load(shared_files.net("transformer_encoder", exporter))
    path = next(path for path in whole if path.endswith(".1"))
    htp_export.extract(whole, path, tmp_path / "part.onnx")
    part = htp_export.load(tmp_path / "part.onnx")
    below = [each for each in whole if each.startswith(path)]
    assert [each for each in part if each.startswith(path)] == below
    assert part.hierarchy[path] == whole.hierarchy[path]
    assert {owner.startswith(path) for node in part.nodes for owner in part.owners_of(node)} == {
        True
    }
    named = {
        value.name for value in part.model.graph.initializers.values() if path in str(value.name)
    }
    assert named == {
        value.name for value in whole.model.graph.initializers.values() if path in str(value.name)
    }
    assert not any(value.uses() == () for value in part.model.graph.initializers.values())
    assert part.model.opset_imports == whole.model.opset_imports


def test_external_weights_go_into_a_file_beside_the_part(tmp_path):
    model = spread(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))).eval()
    exported_to(tmp_path / "net.onnx", model, {"input": x(2, 64)}, "dynamo")
    folder = tmp_path / "apart"
    folder.mkdir()
    htp_export.extract(tmp_path / "net.onnx", "1", folder / "part.onnx")
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sizes.keys() == {"part.onnx", "part.onnx.data"}
    assert 64 * 64 * 4 <= sizes["part.onnx.data"] <= 64 * 64 * 4 + 64 * 4
    assert sizes["part.onnx"] < 64 * 64
    given = x(2, 64, seed=3)
    (found,) = run_file(folder / "part.onnx", {"input": given.numpy()})
    assert equal(found, model[1](given).detach().numpy())


def test_a_call_of_a_module_that_ran_twice_is_a_module_that_ran_once():
    whole = htp_export.load(handmade.called_twice())
    part = htp_export.load(htp_export.extract(whole, "block", call=1).model)
    assert part.hierarchy["block"].calls == 1
    assert [
        (node.name, node.metadata_props.get("htp.call")) for node in part["block.fc"].nodes
    ] == [
        ("node_fc2", "0"),
        ("node_fc3", "1"),
    ]


def test_what_other_modules_share_belongs_to_the_module_alone():
    part = htp_export.load(htp_export.extract(handmade.encoder(), "layer.1").model)
    owners = {node.op_type: part.owners_of(node) for node in part.nodes}
    assert owners == {"Neg": ("layer.1",), "MatMul": ("layer.1.fc",), "Mul": ("layer.1",)}


def test_what_a_branch_reads_becomes_an_input():
    result = htp_export.extract(handmade.branching(), "gate")
    assert list(result.inputs) == ["condition", "x", "minus"]
    assert [value.name for value in result.model.graph.outputs] == ["gated"]


def test_functions_come_along():
    result = htp_export.extract(handmade.with_function(), "block")
    assert [name for _, name, _ in result.model.functions] == ["Block"]


def test_an_inner_tensor_that_has_an_arguments_name_gets_another():
    whole = handmade.encoder()
    whole.metadata_props["htp.signatures"] = '{"layer.0":[[{"fc0":"x"},["layer0"]]]}'
    before = ir.to_proto(whole).SerializeToString()
    result = htp_export.extract(whole, "layer.0")
    assert ir.to_proto(whole).SerializeToString() == before
    names = [value.name for node in result.model.graph for value in node.outputs]
    assert list(result.inputs) == ["fc0"]
    assert "fc0" not in names
    assert len(set(names)) == len(names)
    onnx.checker.check_model(ir.to_proto(result.model))


def test_a_fused_module_says_which_to_take_instead(tmp_path):
    def block():
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())

    net = spread(nn.Sequential(block(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))).eval()
    given = torch.randn(1, 3, 4, 4)
    htp_export.export(net, (given,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    with pytest.raises(InputError, match=r"'0.0' was fused with '0.1'.* take '0' instead"):
        htp_export.extract(tmp_path / "net.onnx", "0.0", tmp_path / "part.onnx")
    assert not (tmp_path / "part.onnx").exists()
    assert htp_export.extract(tmp_path / "net.onnx", "0").nodes > 0
    # only the whole model is around this one
    with pytest.raises(InputError, match=r"'1' was fused with '2'.*optimize=False"):
        htp_export.extract(tmp_path / "net.onnx", "1", tmp_path / "part.onnx")
    plain = tmp_path / "plain.onnx"
    htp_export.export(net, (given,), plain, dynamo=True, optimize=False, verbose=False)
    assert htp_export.extract(plain, "1").nodes > 0


@pytest.mark.parametrize(
    ("model", "path", "call", "message"),
    [
        (handmade.encoder, "layer.0", -1, "has no call -1"),
        (handmade.branching, "gate.yes", 0, "inside a branch.*'gate' instead"),
    ],
)
# and in test_wrong_input
def test_what_cannot_be_cut_is_said(model: Any, path: str, call: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        htp_export.extract(model(), path, call=call)
