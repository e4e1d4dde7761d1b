"""Verify: a PyTorch model against its file, module by module."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.verify.pytorch_run import parameter_readers
from htp_export.errors import InputError, UntaggedModelError
from htp_export.format.tags import is_under
from tests import faults
from tests.exporting import exported, quick
from tests.nets import EXPORTERS, NETS, Apply, Holding, ready, spread, x

BOTH = pytest.mark.parametrize("exporter", EXPORTERS)
MODES = pytest.mark.parametrize("isolated", [False, True], ids=["whole", "isolated"])


class Block(nn.Module):
    """Two linears around a ReLU, and a sum."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.act, self.second = (
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
        )
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dropout(self.second(self.act(self.first(x)))))


class Stack(Holding, blocks=nn.ModuleList(Block() for _ in range(3)), unused=nn.Linear(2, 2)):
    """Three blocks, the second of which runs twice."""

    def forward(self, x: torch.Tensor) -> Any:
        first = self.blocks[0](x)
        twice = self.blocks[1](self.blocks[1](first))
        return {"hidden": twice, "parts": (self.blocks[2](twice), first * 2)}


def stack() -> tuple[nn.Module, dict[str, Any]]:
    return spread(Stack()).eval(), {"x": x(2, 4)}


@pytest.fixture(scope="module")
def stack_files(tmp_path_factory):
    """The stack's file from each exporter; not to be written to."""
    made = {}
    for exporter in EXPORTERS:
        model, kwargs = stack()
        made[exporter] = file_of(model, kwargs, tmp_path_factory.mktemp(exporter), exporter)
    return made


@pytest.fixture
def stack_file(stack_files):
    return stack_files["dynamo"]


def verified(file: Any, **options: Any) -> htp_export.results.Verification:
    """The stack against a file of it."""
    model, kwargs = stack()
    return htp_export.verify(model, file, (), kwargs, **options)


def file_of(
    model: nn.Module, kwargs: dict[str, Any], folder: Path, exporter: str = "dynamo", **options: Any
) -> Path:
    exported(model, kwargs, exporter, folder, **options)
    return folder / "model.onnx"


# Modules that are not compared, and those inside: they run only in branches that their nets do not take on these
# inputs, or they return numbers, which are no tensors of the file.
NOT_COMPARED = {
    "cond_over_self": ("choose.up",),
    "modules_in_branches": ("act",),
    "branches_inside_branches": ("one.inner", "two.block"),
    "passes_numbers": ("counts",),
}
QUICK = {
    "called_twice",
    "two_parents",
    "conv_bn_relu",
    "dict_of_tuples",
    "lstm",
    "in_place",
    "cond_over_self",
}


CASES = [
    pytest.param(
        name, exporter, id=f"{name}-{exporter}", marks=() if name in QUICK else pytest.mark.slow
    )
    for name, net in NETS.items()
    for exporter in EXPORTERS
    if exporter not in net.skip
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_what_was_exported_agrees_as_a_whole_and_each_module_alone(shared_files, name, exporter):
    model, kwargs = NETS[name].build()
    path = shared_files.net(name, exporter)
    for isolated in (False, True):
        result = htp_export.verify(model, path, (), kwargs, isolated=isolated)
        assert result.ok, str(result)
        assert result.modules[""].status == "agrees"
        untold = {
            each.path
            for each in result.modules.values()
            if each.fate == "computed" and not each.compared
        }
        assert untold == {
            each.path
            for each in result.modules.values()
            if each.fate == "computed"
            and any(is_under(each.path, path) for path in NOT_COMPARED.get(name, ()))
        }
        assert all(result.modules[path].status == "not compared" for path in untold)


@BOTH
@MODES
def test_calls_are_compared_one_by_one_and_outputs_in_order(stack_files, exporter, isolated):
    result = verified(stack_files[exporter], isolated=isolated)
    assert result.ok
    assert [call.number for call in result.modules["blocks.1.first"].calls] == [0, 1]
    assert [output.name for output in result.modules[""].calls[0].outputs] == ["0", "1", "2"]
    assert result.modules["blocks.1.dropout"].status == "identity"
    assert result.modules["unused"].status == "uncalled"
    assert result.modules["unused"].max_abs is None
    assert result.summary.startswith("16 of 16 modules agree (worst ")
    assert "not compared: 2 uncalled, 3 identity" in str(result)


FAULTS = [
    (faults.weight_changed, "blocks.0.first"),
    (faults.matrix_transposed, "blocks.1.second"),
    (faults.bias_dropped, "blocks.2.first"),
    (faults.nan_planted, "blocks.1.first"),
    (faults.epsilon_changed, "blocks.2.norm"),
    (faults.residual_swapped, "blocks.2"),
]


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo"))
def test_each_fault_is_found_in_its_module(stack_files, exporter):
    path = stack_files[exporter]
    for isolated in (False, True):
        for plant, at in FAULTS:
            tagged = htp_export.load(path)
            plant(tagged, at)
            result = verified(tagged, isolated=isolated)
            assert not result.ok
            assert (plant.__name__, result.wrong) == (plant.__name__, (at,))
            assert result.modules[at].status == "differs"
            assert result.summary.startswith(f"first wrong: {at}: ")
            assert result.modules[""].status == "inherits"


def test_in_a_whole_run_modules_after_the_fault_inherit_it_and_alone_they_agree(stack_file):
    tagged = htp_export.load(stack_file)
    faults.weight_changed(tagged, "blocks.0.second")
    whole = verified(tagged)
    assert {
        whole.modules[path].status for path in ("blocks.0.norm", "blocks.1", "blocks.2.norm")
    } == {"inherits"}
    # though the error fades in blocks.2.act and grows again after it
    assert whole.wrong == ("blocks.0.second",)
    assert whole.modules["blocks.0.first"].status == "agrees"
    assert "modules after it inherit the error" in whole.summary
    alone = verified(tagged, isolated=True)
    assert {
        alone.modules[path].status for path in ("blocks.0.norm", "blocks.1", "blocks.2.second")
    } == {"agrees"}
    assert {path for path, module in alone.modules.items() if module.status == "inherits"} == {
        "",
        "blocks.0",
    }


def test_alone_two_faults_are_both_found_innermost_first(stack_file):
    tagged = htp_export.load(stack_file)
    for path in ("blocks.2.second", "blocks.0.first"):
        faults.weight_changed(tagged, path)
    assert verified(tagged).wrong == ("blocks.0.first",)
    alone = verified(tagged, isolated=True)
    assert alone.wrong == ("blocks.0.first", "blocks.2.second")
    assert "also wrong: blocks.2.second" in alone.summary


class MakesMask(Holding, layer=Apply(lambda y, z: y + z)):
    """Gives a module a tensor that it computes itself and that no module gives back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(x), x * 3).relu()


def test_what_a_module_was_given_wrongly_is_blamed_on_who_made_it(tmp_path):
    model, kwargs = MakesMask().eval(), {"x": x(2, 4)}
    tagged = htp_export.load(file_of(model, kwargs, tmp_path))
    next(node for node in tagged.nodes if node.op_type == "Tanh").op_type = "Sigmoid"
    result = htp_export.verify(model, tagged, (), kwargs)
    assert result.wrong == ("",)
    assert result.modules["layer"].status == "inherits"


def test_a_merged_module_is_named_with_those_it_was_merged_with(shared_files):
    model, kwargs = NETS["conv_bn_relu"].build()
    path = shared_files.net("conv_bn_relu", "dynamo")
    for isolated in (False, True):
        tagged = htp_export.load(path)
        assert (
            htp_export.verify(model, tagged, (), kwargs, isolated=isolated).modules["0"].status
            == "fused"
        )
        faults.weight_changed(tagged, "1")
        result = htp_export.verify(model, tagged, (), kwargs, isolated=isolated)
        assert result.first_wrong == "1"
        assert result.summary.startswith("first wrong: 1 (merged with '0'): max ")


def test_a_wrong_output_of_the_file_is_found_where_no_module_makes_it(stack_file):
    tagged = htp_export.load(stack_file)
    outputs = tagged.model.graph.outputs
    outputs[0], outputs[1] = outputs[1], outputs[0]
    result = verified(tagged)
    assert not result.ok
    assert result.first_wrong == ""


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": torch.relu(x), "out": torch.tanh(x)}


def test_a_missing_output_is_no_agreement(tmp_path):
    model, kwargs = Two().eval(), {"x": x(2, 4)}
    path = file_of(model, kwargs, tmp_path)
    file = onnx.load(path)
    del file.graph.output[1]
    del file.metadata_props[:]
    onnx.save(file, path)
    result = htp_export.verify(model, path, (), kwargs)
    assert not result.ok
    assert "1 of the 2 tensors that PyTorch returns" in result.summary


def test_portions_give_the_same_as_one_run(stack_file):
    for isolated, portions in ((False, (1, 200)), (True, (1,))):
        one = verified(stack_file, isolated=isolated).to_dict()
        for portion in portions:
            assert verified(stack_file, isolated=isolated, portion_bytes=portion).to_dict() == one


def test_a_tolerance_holds_for_the_modules_it_selects(stack_file):
    tagged = htp_export.load(stack_file)
    faults.change(tagged, faults.weights(tagged, "blocks.2.second")[0], lambda array: array + 1e-3)
    tolerance = {"class:Linear": (0.0, 0.0), "blocks.2.**": (0.1, 0.1), ".": (0.1, 0.1)}
    strict = verified(tagged)
    assert strict.wrong == ("blocks.2.second",)
    lenient = verified(tagged, tolerances={k: tolerance[k] for k in ("blocks.2.**", ".")})
    assert lenient.ok
    with pytest.raises(InputError, match="class:Lnear"):
        verified(tagged, tolerances={"class:Lnear": (0.1, 0.1)})
    with pytest.raises(InputError, match="not two numbers"):
        verified(tagged, tolerances={"class:Linear": (-0.1, 0.1)})


def test_only_selected_modules_are_compared(stack_file):
    tagged = htp_export.load(stack_file)
    faults.weight_changed(tagged, "blocks.0.second")
    result = verified(tagged, select="blocks.0.first")
    assert list(result.modules) == ["blocks.0.first"]
    assert result.ok
    assert verified(tagged, select="blocks.0.norm").ok is False


def renamed(source: Path, path: Path) -> Path:
    """As by a tool that gives tensors other names."""
    file = onnx.load(source)
    kept = {
        value.name for value in (*file.graph.input, *file.graph.output, *file.graph.initializer)
    }
    for node in file.graph.node:
        for names in (node.input, node.output):
            names[:] = [name if not name or name in kept else f"t_{name}" for name in names]
    del file.graph.value_info[:]
    onnx.save(file, path)
    return path


@BOTH
def test_tensors_with_other_names_are_found_at_the_borders_of_regions(
    stack_files, tmp_path, exporter
):
    path = renamed(stack_files[exporter], tmp_path / "renamed.onnx")
    result = verified(path)
    assert result.ok, str(result)
    assert result.modules["blocks.0.first"].status == "agrees"
    assert "the file does not name its tensors" in result.modules["blocks.0.first"].reason
    tagged = htp_export.load(path)
    faults.weight_changed(tagged, "blocks.0.second")
    assert verified(tagged).first_wrong == "blocks.0.second"


def test_a_file_without_our_tags_is_compared_by_torchs_scopes(tmp_path):
    model, kwargs = NETS["siblings"].build()
    torch.onnx.export(model, (), tmp_path / "plain.onnx", kwargs=kwargs, dynamo=True, verbose=False)
    result = htp_export.verify(model, tmp_path / "plain.onnx", (), kwargs)
    assert result.ok
    assert {path for path, module in result.modules.items() if module.status == "agrees"} == {
        "",
        "first",
        "second",
    }


def test_modules_inside_functions_are_compared(stack_file, tmp_path):
    model, kwargs = stack()
    nested = tmp_path / "nested.onnx"
    htp_export.functions(stack_file, "blocks.0", nested)
    for isolated in (False, True):
        result = htp_export.verify(model, nested, (), kwargs, isolated=isolated)
        assert result.ok, str(result)
        assert {result.modules[f"blocks.{k}.first"].status for k in range(2)} == {"agrees"}


# --- the model is left as it was ---------------------------------------------------------------------------


class KeepsTable(Holding, fc=nn.Linear(4, 4)):
    """Computes a table in its first call, and keeps it."""

    kept: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = [torch.arange(4) / 4]
        return self.fc(x) * self.kept[0]


def test_a_model_in_which_an_export_left_a_tensor_without_values_is_refused(tmp_path):
    net = nn.Sequential(KeepsTable()).eval()
    file = file_of(net, {"input": x(2, 4)}, tmp_path, "dynamo")
    left = (
        r"torch\.export .* left one in attribute 'kept\.0' of module '0', .* create the model anew"
    )
    with pytest.raises(InputError, match=left):
        htp_export.verify(net, file, (x(2, 4),))
    again = nn.Sequential(KeepsTable()).eval()
    again.load_state_dict(net.state_dict())
    assert htp_export.verify(again, file, (x(2, 4),)).ok


def state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    modes = [module.training for module in model.modules()]
    return hooks, modes, torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()


def test_the_model_is_left_as_it_was_where_it_fails_too(stack_file, monkeypatch):
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("no more")

    model, kwargs = stack()
    model.train()
    model.blocks[0].eval()
    before, values = (
        state(model),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    assert htp_export.verify(model, stack_file, (), kwargs).ok
    assert state(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(model.blocks[1].act, "forward", fail)
    with pytest.raises(
        InputError,
        match=r"cannot run on these inputs in module 'blocks\.1\.act': ValueError: no more",
    ):
        htp_export.verify(model, stack_file, (), kwargs)
    assert state(model) == before


# --- bad input -----------------------------------------------------------------------------------------------


class Other(nn.Module):
    def __init__(self, last: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(width, width), nn.ReLU(), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)))


def test_a_file_of_another_model_is_refused(tmp_path):
    path = file_of(spread(Other(nn.Linear(4, 4))).eval(), {"x": x(2, 4)}, tmp_path)
    for model, message in (
        (Other(nn.LayerNorm(4)), "its module 'last' has the class Linear, not LayerNorm"),
        (
            Other(nn.Linear(4, 5)),
            "its 'last.weight' has the shape [4, 4], and the model's has [5, 4]",
        ),
        (Other(nn.Linear(4, 4)).double(), "4 of 4 parameters have other values"),
        (spread(Other(nn.Linear(4, 4)), seed=1), "4 of 4 parameters have other values"),
        (nn.Sequential(nn.Linear(4, 4)), "its module '(root)' has the class Other, not Sequential"),
    ):
        with pytest.raises(InputError) as refused:
            htp_export.verify(model.eval(), path, (), {"x": x(2, 4)})
        assert message in str(refused.value)
        assert "was not exported from this" in str(refused.value)


def test_a_file_that_lacks_modules_of_the_model_is_refused(stack_file):
    large = Stack()
    large.blocks.append(Block())
    large.blocks[2] = nn.Sequential(large.blocks[2], nn.Linear(4, 4))
    with pytest.raises(InputError, match="was not exported from this Stack"):
        htp_export.verify(spread(large).eval(), stack_file, (), {"x": x(2, 4)})


def test_wrong_inputs_are_said_with_what_the_file_wants(stack_file):
    model, _ = stack()
    with pytest.raises(
        InputError,
        match=r"model\.onnx: input 'x': is float \[3, 4\], but the model requires float \[2, 4\]",
    ):
        htp_export.verify(model, stack_file, (x(3, 4),))
    with pytest.raises(InputError, match="takes 1 inputs, and the call has 0 tensors"):
        htp_export.verify(model, stack_file)


def test_an_untagged_file_is_refused(stack_file, tmp_path):
    file = onnx.load(stack_file)
    for entries in (file.metadata_props, *(node.metadata_props for node in file.graph.node)):
        del entries[:]
    onnx.save(file, tmp_path / "plain.onnx")
    with pytest.raises(UntaggedModelError, match=r"plain\.onnx: has no module tags"):
        verified(tmp_path / "plain.onnx")


def test_what_cannot_be_run_is_said_with_the_module(stack_file):
    tagged = htp_export.load(stack_file)
    node = next(node for node in tagged["blocks.2.act"].nodes if node.op_type == "Relu")
    node.op_type = "Relux"
    with pytest.raises(
        InputError, match=r"ONNX Runtime cannot load it in module 'blocks.2.act'.*Relux"
    ):
        verified(tagged)
    alone = verified(tagged, isolated=True)
    assert alone.wrong == ("blocks.2.act",)
    assert "Relux" in alone.summary
    assert alone.modules["blocks.1"].status == "agrees"


def test_weights_in_memory_are_shared_with_onnx_runtime(shared_files, monkeypatch):
    monkeypatch.setattr("htp_export.runtime.runner._SMALL_BYTES", 63)
    for name in ("lstm", "cond", "conv_bn_relu"):
        model, kwargs = NETS[name].build()
        in_memory = htp_export.load(shared_files.read(name, "dynamo"))
        for isolated in (False, True):
            result = htp_export.verify(model, in_memory, (), kwargs, isolated=isolated)
            assert result.ok, str(result)


# --- parameters and their readers -----------------------------------------------------------------------------


class Borrowing(Holding, fc=nn.Linear(4, 3)):
    """Reads the weight of a module that never runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.fc.weight, self.fc.bias)


class Positions(Holding, table=nn.Embedding(4, 8)):
    """Reads its whole table: that folds into a constant; of two calls, into two that are equal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[1]))


@pytest.mark.long
@BOTH
def test_parameters_are_read_where_pytorch_reads_them(tmp_path, shared_files, exporter):
    """Also where two modules share one, or the TorchScript exporter merges equal ones under one name."""
    files = {
        name: shared_files.net(name, exporter)
        for name in ("siblings", "tied_weights", "twin_branches")
    }
    cases = [(*NETS[name].build(), file) for name, file in files.items()]
    positions = Positions()
    made = (
        (Borrowing(), {"x": x(2, 4)}),
        (nn.Sequential(positions, nn.Tanh(), positions), {"input": x(2, 4, 8)}),
    )
    for model, kwargs in made:
        folder = tmp_path / type(model).__name__
        folder.mkdir()
        cases.append((model.eval(), kwargs, file_of(model, kwargs, folder, exporter)))
    for each, inputs, file in cases:
        result = htp_export.verify(each, file, (), inputs)
        assert result.ok, str(result)
        assert result.parameters >= 1
        assert result.misplaced == ()


def owned_by(path: str, op_type: str, file: Path) -> Path:
    model = onnx.load(file)
    for node in model.graph.node:
        if node.op_type == op_type:
            del node.metadata_props[:]
            node.metadata_props.add(key="htp.module", value=path)
    onnx.save(model, file)
    return file


def test_a_parameter_read_by_a_node_of_another_module_is_misplaced(tmp_path):
    model, kwargs = NETS["siblings"].build()
    path = owned_by("second", "Gemm", file_of(model, kwargs, tmp_path))
    result = htp_export.verify(model, path, (), kwargs)
    assert not result.ok
    # its values agree, but the graph shows that other nodes compute them
    assert result.wrong == ("first",)
    assert {line.split()[0] for line in result.misplaced} == {"first.weight", "first.bias"}
    assert "owners of 2 of 4 parameters are wrong" in result.summary


def test_a_weight_that_lost_its_name_to_a_transposition_is_looked_at_too(tmp_path):
    model, kwargs = (
        nn.Sequential(spread(nn.Linear(4, 3)), nn.ReLU()).eval(),
        {"input": torch.ones(1, 2, 4)},
    )
    path = file_of(model, kwargs, tmp_path)
    assert htp_export.verify(model, path, (), kwargs).parameters == 2
    result = htp_export.verify(model, owned_by("1", "MatMul", path), (), kwargs)
    assert [line.split()[0] for line in result.misplaced] == ["0.weight"]


def test_readers_are_the_modules_that_hold_or_read_a_parameter():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    query = torch.randn(1, 3, 4)
    with parameter_readers(model) as readers:
        model(query, query, query)
    assert readers["out_proj.weight"] == {"", "out_proj"}
    assert readers["in_proj_weight"] == {""}


# --- precision and values ---------------------------------------------------------------------------------------


class Scaled(Holding, scale=nn.Parameter(torch.rand(32) + 0.5)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # ONNX Runtime multiplies no bfloat16 on CPUs
        return (x.float() * self.scale.float()).to(x.dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_compared_in_their_own_precision(tmp_path, dtype):
    model, kwargs = (
        ready(nn.Sequential(Scaled(), Scaled())).to(dtype),
        {"input": x(2, 32).to(dtype)},
    )
    tagged = htp_export.load(file_of(model, kwargs, tmp_path))
    result = htp_export.verify(model, tagged, (), kwargs)
    assert result.ok, str(result)
    faults.change(
        tagged, faults.weights(tagged, "1")[0], lambda array: (array * 1.5).astype(array.dtype)
    )
    assert htp_export.verify(model, tagged, (), kwargs).wrong == ("1",)


def test_nan_agrees_with_nan(stack_file):
    model, kwargs = stack()
    assert htp_export.verify(model, stack_file, (), {"x": torch.full((2, 4), float("nan"))}).ok
    with torch.no_grad():
        model.blocks[1].second.bias[0] = float("nan")
    result = htp_export.verify(model, stack_file, (), kwargs)
    assert result.first_wrong == "blocks.1.second"
    assert np.isnan(result.modules["blocks.1.second"].max_abs)
    assert "NaN on one side only" in result.summary


def test_a_result_is_plain_data(stack_file):
    model, kwargs = stack()
    with torch.no_grad():
        model.blocks[0].first.weight[0, 0] = float("nan")
    plain = json.loads(
        json.dumps(htp_export.verify(model, stack_file, (), kwargs).to_dict(), allow_nan=False)
    )
    assert plain["first_wrong"] == "blocks.0.first"
    assert plain["modules"]["blocks.0.first"]["max_abs"] == "nan"
    assert plain["modules"]["blocks.1.first"]["calls"][1]["call"] == 1
