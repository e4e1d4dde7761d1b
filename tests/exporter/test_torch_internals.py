"""The private parts of torch that htp_export uses are where it looks for them."""

import contextvars
import inspect
import types
from typing import Any

import pytest
import torch
from torch import nn

from htp_export.errors import TorchChangedError
from htp_export.exporter.capture import dynamo_patches, patches, torch_internals
from htp_export.exporter.capture.patching import Patch, Patches
from htp_export.process.restoring import restored
from tests import traceless

EVERY = [patch for group in patches.EVERY for patch in group.patches]


@pytest.fixture(scope="module", autouse=True)
def translations_read_once() -> None:
    """Nothing of torch is patched here while no export runs, unlike in other tests."""


def is_ours(what: Any) -> bool:
    """Whether htp_export defines it; ``__module__`` does not say so, as `functools.wraps` copies that."""
    where = getattr(what, "__globals__", None)
    defined_in = where["__name__"] if where else type(what).__module__
    return defined_in.partition(".")[0] == "htp_export"


@pytest.mark.parametrize("patch", EVERY, ids=lambda patch: f"{patch.module}.{patch.name}")
def test_a_place_is_there_and_is_patched_while_its_group_is_held_and_never_else(patch):
    owner, name, original = patch.find()
    # what a class inherits must not stay in it
    is_own = name in vars(owner)
    assert is_own or isinstance(owner, type)
    assert getattr(owner, name) == original  # a class method is bound anew each time
    assert callable(original) or isinstance(original, types.ModuleType | property)
    [group] = [group for group in patches.EVERY if patch in group.patches]
    assert not is_ours(original)
    with restored(group.hold):
        assert is_ours(patch.find()[2])
    assert not is_ours(patch.find()[2])
    assert (name in vars(owner)) == is_own


def test_what_torch_gives_to_the_dynamo_exporter_whatever_is_asked_for():
    types = torch_internals.exported_by_dynamo_alone()
    assert torch.export.ExportedProgram in types
    source = inspect.getsource(torch.onnx.export)
    assert all(each.__name__ in source for each in types)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.onnx._internal.exporter._core", "export_as_it_was"),
        ("torch.onnx._internal.no_such_module", "export"),
        ("torch.onnx", "ONNXProgram.no_such_method"),
        ("torch.onnx", "NoSuchClass.method"),
    ],
)
def test_a_place_that_is_gone_is_named(module, name):
    with pytest.raises(TorchChangedError, match=f"{module}.{name}") as caught:
        Patch(module, name, lambda original: original).find()
    assert caught.value.what == f"{module}.{name}"
    assert torch.__version__ in str(caught.value)


def refuses(original: Any) -> Any:
    raise ValueError("another signature")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Patch("torch.onnx", "ONNXProgram.gone", lambda original: original), r"ONNXProgram\.gone"),
        (
            Patch("torch.onnx", "ONNXProgram.save", refuses),
            r"torch\.onnx\.ONNXProgram\.save is not what it was",
        ),
        (
            Patch("builtins", "dict.get", lambda original: lambda self: None),
            r"builtins\.dict\.get is not what it was",
        ),
    ],
)
def test_where_one_place_is_gone_or_cannot_be_wrapped_or_replaced_none_is_patched(fault, message):
    original = torch.onnx.ONNXProgram.optimize
    good = Patch("torch.onnx", "ONNXProgram.optimize", lambda original: lambda self: original(self))
    group = Patches(good, fault)
    for _ in range(2):
        with pytest.raises(TorchChangedError, match=message), restored(group.hold):
            pass
        assert torch.onnx.ONNXProgram.optimize is original
    # nothing is left that a later user would take for the original
    with restored(Patches(good).hold):
        assert torch.onnx.ONNXProgram.optimize is not original
    assert torch.onnx.ONNXProgram.optimize is original


def test_patches_go_in_with_the_first_user_and_out_with_the_last():
    original = nn.ReLU.extra_repr
    patches = Patches(Patch("torch.nn", "ReLU.extra_repr", lambda original: lambda self: "patched"))
    with restored(patches.hold):
        wrapped = nn.ReLU.extra_repr
        assert nn.ReLU().extra_repr() == "patched"
        with restored(patches.hold):
            assert nn.ReLU.extra_repr is wrapped
        assert nn.ReLU.extra_repr is wrapped
    assert nn.ReLU.extra_repr is original


def test_translations_of_operators_are_read_once_by_who_asks_for_it():
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = []

    def counted(**options: Any) -> types.SimpleNamespace:
        read.append(options)
        return types.SimpleNamespace(**options, functions={"aten::relu": ["its translation"]})

    from_torchlib = dynamo_patches.read_once(counted).__func__
    before = vars(ONNXRegistry)["from_torchlib"]
    assert ONNXRegistry.from_torchlib(opset_version=18).functions  # as the stand-in has them
    with patches.translations_read_once():
        one, other = (from_torchlib(opset_version=20) for _ in range(2))
        assert from_torchlib(opset_version=18).opset_version == 18
        assert len(read) == 2
        contextvars.Context().run(from_torchlib, opset_version=20)  # another thread or task
        assert len(read) == 3
    assert vars(ONNXRegistry)["from_torchlib"] is before
    from_torchlib(opset_version=20)
    assert len(read) == 4
    one.functions["aten::relu"].clear()
    assert other.functions["aten::relu"]  # an export's own translations stay its own


def test_operators_are_listed_once_and_again_if_there_are_others():
    from torch.export import exported_program

    original = exported_program._collect_all_valid_cia_ops
    with restored(patches.DYNAMO.hold):
        first = exported_program._collect_all_valid_cia_ops()
        assert first == original()
        assert exported_program._collect_all_valid_cia_ops() is first
        with torch.library._scoped_library("htp_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
            assert torch.ops.htp_test.twice.default in exported_program._collect_all_valid_cia_ops()
        assert exported_program._collect_all_valid_cia_ops() == first
    assert exported_program._collect_all_valid_cia_ops is original


def test_dynamo_says_in_which_modules_a_node_runs_by_their_ids():
    model, graphs = nn.Sequential(nn.Sequential(nn.Tanh())), []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(lambda x: model(model(x)).sin(), backend=backend)(torch.ones(2))
    first, second, sin = (node for node in graphs[0].graph.nodes if node.op.startswith("call"))
    modules = [id(model), id(model[0]), id(model[0][0])]
    assert [scope.module for scope in torch_internals.scopes_of(first)] == modules
    assert [scope.module for scope in torch_internals.scopes_of(second)] == modules
    assert not {scope.key for scope in torch_internals.scopes_of(first)} & {
        scope.key for scope in torch_internals.scopes_of(second)
    }
    assert torch_internals.scopes_of(sin) == []


def test_layers_of_torch_are_known_by_their_code():
    assert torch_internals.is_forward_of_layer(torch.nn.Linear.forward.__code__)
    assert not torch_internals.is_forward_of_layer(traceless.Block.forward.__code__)
    assert not torch_internals.is_forward_of_layer(torch.nn.Linear.__init__.__code__)
