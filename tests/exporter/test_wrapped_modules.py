"""Modules that were wrapped or rewritten: LoRA, parametrizations, compiled and scripted ones, and half precision."""

import itertools
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import htp_export
from htp_export.errors import OnnxRuntimeError
from tests.exporting import BOTH, exported, quick
from tests.nets import EXPORTERS, Holding, spread, x
from tests.truth import inexact, tree_of, work_of


class Block(Holding, fc=nn.Linear(4, 4), act=nn.GELU(), out=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.fc(x))) + x


class Two(nn.Module):
    """One module after another."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


class Symmetric(nn.Module):
    """A parametrization: the upper triangle, and its mirror image."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class LowRank(
    Holding,
    base_layer=nn.Linear(4, 4),
    lora_dropout=nn.ModuleDict({"default": nn.Dropout(0.1)}),
    lora_A=nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)}),
    lora_B=nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)}),
):
    """A linear layer with a low-rank addition, in the shape that PEFT gives it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + self.lora_B["default"](low) * 0.5


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def symmetric(layer: nn.Linear, mirror: nn.Module | None = None) -> nn.Linear:
    parametrize.register_parametrization(layer, "weight", mirror or Symmetric())
    return layer


def sharing_a_parametrization() -> nn.Module:
    mirror = Symmetric()
    return Two(symmetric(linear(), mirror), symmetric(linear(), mirror))


class WithCachedWeights(Holding, inner=symmetric(linear())):
    """Calls a module twice with its parametrized weights computed once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            y: torch.Tensor = self.inner(self.inner(x).tanh())
        return y


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[assignment]


def compiled_in_place() -> nn.Module:
    block = Block()
    block.compile(backend="eager")
    return Two(linear(), block)


BUILT: dict[str, Callable[[], nn.Module]] = {
    "low_rank": lambda: Two(LowRank(), LowRank()),
    "parametrization": lambda: Two(symmetric(linear()), linear()),
    "parametrization_twice": lambda: Two(symmetric(symmetric(linear())), linear()),
    "shared_parametrization": sharing_a_parametrization,
    "weight_norm": lambda: Two(parametrizations.weight_norm(linear()), linear()),
    "pruned": lambda: Two(prune.random_unstructured(linear(), "weight", 0.3), linear()),  # type: ignore[no-untyped-call]
    "spectral_norm_by_hook": lambda: Two(nn.utils.spectral_norm(linear()), linear()),
}
# TorchScript refuses these.
UNDER_DYNAMO: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: Two(parametrizations.spectral_norm(linear()), linear()),
    "cached_parametrization": WithCachedWeights,
    "compiled": lambda: Two(linear(), compiled(Block())),
    "compiled_layer": lambda: Two(compiled(linear()), linear()),
    "compiled_root": lambda: compiled(Two(linear(), Block())),
    "compiled_in_place": compiled_in_place,
    "traced": lambda: Two(linear(), torch.jit.trace(Block(), torch.ones(3, 4))),  # type: ignore[no-untyped-call]
}
REFUSED = {"scripted": lambda: Two(linear(), torch.jit.script(Block()))}
QUICK = ("low_rank", "shared_parametrization", "cached_parametrization", "compiled_root", "traced")
DYNAMO = quick(
    [(name, "dynamo") for name in (*BUILT, *UNDER_DYNAMO)], *((name, "dynamo") for name in QUICK)
)
CASES = [*((name, "torchscript") for name in BUILT), *DYNAMO]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return spread({**BUILT, **UNDER_DYNAMO, **REFUSED}[name]()).eval()


@pytest.mark.long
@pytest.mark.parametrize(("name", "exporter"), CASES)
# hooks that put a weight in place
@pytest.mark.filterwarnings("ignore:The tensor attribute self:UserWarning")
def test_a_wrapped_module_is_exact(name, exporter, tmp_path):
    model, kwargs = built(name), {"x": x(3, 4)}
    assert inexact(model, kwargs, exported(model, kwargs, exporter, tmp_path)) == []


def test_the_module_inside_a_compiled_one_runs_and_owns_its_nodes(tmp_path):
    file = exported(built("compiled"), {"x": x(3, 4)}, "dynamo", tmp_path)
    assert work_of(file) == [
        ("Gemm", ("one",)),
        ("Relu", ("",)),
        ("Gemm", ("two._orig_mod.fc",)),
        ("Gelu", ("two._orig_mod.act",)),
        ("Gemm", ("two._orig_mod.out",)),
        ("Add", ("two._orig_mod",)),
    ]
    assert {
        path: entry["fate"] for path, entry in tree_of(file).items() if "two" in path
    } == dict.fromkeys(
        ("two", "two._orig_mod", "two._orig_mod.fc", "two._orig_mod.act", "two._orig_mod.out"),
        "computed",
    )


def test_the_nodes_of_a_traced_submodule_belong_to_it(tmp_path):
    file = exported(built("traced"), {"x": x(3, 4)}, "dynamo", tmp_path)
    assert [found for _, found in work_of(file)] == [
        ("one",),
        ("",),
        ("two",),
        ("two",),
        ("two",),
        ("two",),
    ]


COMPILED = "is compiled, which TorchScript cannot trace: use dynamo=True"
SCRIPTED = "module 'two' is a ScriptModule, which torch exports only within one: put the original module in its place"


@pytest.mark.parametrize(
    ("name", "exporter", "advice"),
    [
        ("compiled", "torchscript", f"module 'two' {COMPILED}"),
        ("compiled_in_place", "torchscript", f"module 'two' {COMPILED}"),
        ("compiled_root", "torchscript", f"module '(the root)' {COMPILED}"),
        ("traced", "torchscript", SCRIPTED),
        ("scripted", "torchscript", SCRIPTED),
        ("scripted", "dynamo", SCRIPTED),
    ],
)
def test_an_error_says_which_module_torch_refuses_and_what_to_do(name, exporter, advice, tmp_path):
    with pytest.raises(Exception, match=r"export|trace|script|compile") as caught:
        exported(built(name), {"x": x(3, 4)}, exporter, tmp_path)
    assert advice in "\n".join(caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:no signature found:UserWarning")
def test_a_scripted_submodule_is_tagged_where_the_whole_model_is_traced(tmp_path):
    inputs = x(3, 4)
    model: Any = torch.jit.trace(Two(linear(), torch.jit.script(Block())).eval(), inputs)  # type: ignore[no-untyped-call]
    htp_export.export(model, (inputs,), tmp_path / "model.onnx", dynamo=False, verbose=False)
    assert work_of(onnx.load(str(tmp_path / "model.onnx"))) == [
        ("Gemm", ("one",)),
        ("Relu", ("",)),
        ("Gemm", ("two.fc",)),
        ("Gelu", ("two.act",)),
        ("Gemm", ("two.out",)),
        ("Add", ("two",)),
    ]


# --- half precision ---------------------------------------------------


HALVES = (torch.float16, torch.bfloat16)


def halved(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    return built(name).to(dtype), {"x": x(3, 4).to(dtype)}


@BOTH
@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(itertools.product(("low_rank", "parametrization"), HALVES), ("low_rank", torch.float16)),
)
def test_weights_of_half_precision_have_the_tags_of_full_precision_and_agree(
    name, dtype, exporter, tmp_path
):
    model, kwargs = halved(name, dtype)
    file = exported(model, kwargs, exporter, tmp_path)
    kind = {torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16}[
        dtype
    ]
    assert file.graph.output[0].type.tensor_type.elem_type == kind
    if dtype == torch.float16:
        result = htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs)
        assert result.ok
        assert name != "low_rank" or result.modules["one.lora_B.default"].status == "agrees"
    full = exported(built(name), {"x": x(3, 4)}, exporter, tmp_path)
    assert (work_of(file), tree_of(file)) == (work_of(full), tree_of(full))


def test_onnxruntime_says_which_kernel_it_lacks_for_bfloat16(tmp_path):
    model, kwargs = halved("low_rank", torch.bfloat16)
    exported(model, kwargs, "torchscript", tmp_path)
    with pytest.raises(
        OnnxRuntimeError, match=r"Could not find an implementation for \w+\(\d+\) node"
    ):
        htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs)


# --- PEFT ---------------------------------------------------


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "torchscript"))
@pytest.mark.filterwarnings(
    "ignore::UserWarning:peft.*", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_every_module_of_a_lora_model_of_peft_is_exact(exporter, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the package peft")
    from htp_export.huggingface import example_inputs, load_model

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    bert = load_model("bert", random_weights=True, overrides={**sizes, "vocab_size": 30})
    kwargs = dict(example_inputs(bert))
    config = peft.LoraConfig(r=2, target_modules=["query", "dense"], init_lora_weights=False)
    model = spread(peft.get_peft_model(bert, config)).eval()
    file = exported(model, kwargs, exporter, tmp_path)
    assert inexact(model, kwargs, file) == []
    found = {owner for _, each in work_of(file) for owner in each}
    query = "base_model.model.encoder.layer.1.attention.self.query"
    assert {
        f"{query}.{part}" for part in ("base_layer", "lora_A.default", "lora_B.default")
    } <= found
