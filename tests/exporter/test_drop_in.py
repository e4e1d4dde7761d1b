"""htp_export.export in place of torch.onnx.export: the same call, the same graph, and nothing else has changed."""

import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.onnx import export as imported_before

import htp_export
from htp_export.errors import FileError
from htp_export.exporter.capture import saving
from tests.exporter.test_exactness import small
from tests.exporter.test_interrupts import changed_since, state
from tests.exporting import BOTH, every, exported_net, metadata, quick
from tests.nets import EXPORTERS, NETS, Holding, x
from tests.same_graph import assert_same_graph
from tests.truth import nodes_of, owners_of, tree_of, untagged, work_of

# --- the same signature ---------------------------------------------------


def test_the_signature_is_that_of_torch_and_names():
    def shape(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    # gone since 2.11
    torchs = [parameter for parameter in shape(torch.onnx.export) if parameter[0] != "fallback"]
    own = [(name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("names", "weights")]
    assert shape(htp_export.export) == [*torchs, *own]


# --- the same graph ---------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One export: a net and options; ``reason`` where it is known to differ."""

    net: str
    exporter: str
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.net, self.exporter, self.name)))


TEN = (
    "siblings", "conv_bn_relu", "mask_made_in_every_layer", "loop_of_three", "tied_weights", "odd_keys",
    "dict_of_tuples", "lstm", "in_place", "two_parents", "scaled_dot_product_attention", "positions_from_shapes",
)  # fmt: skip
DYNAMIC = {"x": {0: torch.export.Dim.DYNAMIC}}
CASES = [Case(net, exporter) for net in TEN for exporter in EXPORTERS]
# With dynamo, which takes ten times as long, some of them.
QUICK = ("mask_made_in_every_layer", "in_place")
QUICK_OPTIONS = ("names", "not_optimised", "weights_as_inputs", "opset_14")
CASES += [
    *(
        Case(net, "dynamo")
        for net in (
            "cond",
            "modules_in_branches",
            "graph_module_as_the_model",
            "changes_of_views",
            "picks_twice",
        )
    ),
    Case("siblings", "dynamo", {"dynamic_shapes": DYNAMIC}, "dynamic_shapes"),
    Case("siblings", "dynamo", {"input_names": ["in"], "output_names": ["out"]}, "names"),
    Case("conv_bn_relu", "dynamo", {"optimize": False}, "not_optimised"),
    Case("siblings", "dynamo", {"external_data": False}, "one_file"),
    Case("siblings", "dynamo", {"keep_initializers_as_inputs": True}, "weights_as_inputs"),
    Case("siblings", "dynamo", {"export_params": False}, "no_weights"),
    Case("nested_sequentials", "dynamo", {"opset_version": 14}, "opset_14"),
    Case(
        "siblings",
        "torchscript",
        {"dynamic_axes": {"x": [0]}, "input_names": ["x"]},
        "dynamic_axes",
    ),
    Case("siblings", "torchscript", {"input_names": ["in"], "output_names": ["out"]}, "names"),
    Case("conv_bn_relu", "torchscript", {"do_constant_folding": False}, "not_folded"),
    Case("siblings", "torchscript", {"keep_initializers_as_inputs": True}, "weights_as_inputs"),
    Case("siblings", "torchscript", {"export_params": False}, "no_weights"),
    Case("conv_bn_relu", "torchscript", {"opset_version": 11}, "opset_11"),
]


def is_quick(case: Case) -> bool:
    return case.exporter == "torchscript" or (
        case.name in QUICK_OPTIONS if case.options else case.net in QUICK
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if is_quick(case) else pytest.mark.slow, id=str(case))
        for case in CASES
    ],
)
def test_without_tags_the_file_is_the_one_that_torch_writes(case, shared_files, tmp_path):
    model, kwargs = NETS[case.net].build()
    options = {"verbose": False, **NETS[case.net].export_options(case.exporter), **case.options}
    torch.onnx.export(
        model,
        (),
        tmp_path / "model.onnx",
        kwargs=kwargs,
        dynamo=case.exporter == "dynamo",
        **options,
    )
    torchs = onnx.load(str(tmp_path / "model.onnx"))
    if case.options:
        ours = exported_net(case.net, case.exporter, tmp_path, **case.options)
    else:
        ours = shared_files.read(case.net, case.exporter)
    assert_same_graph(ours, torchs)
    assert untagged(ours) == []
    for one, other in zip(nodes_of(ours), nodes_of(torchs), strict=True):
        assert one.doc_string == other.doc_string


def test_external_data_is_written_as_torch_writes_it(tmp_path):
    written = []
    for name, export in (("torch", torch.onnx.export), ("htp", htp_export.export)):
        (tmp_path / name).mkdir()
        torch.manual_seed(0)
        export(
            nn.Linear(64, 64).eval(),
            (x(1, 64),),
            tmp_path / name / "model.onnx",
            external_data=True,
            verbose=False,
        )
        written.append(
            {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())}
        )
    assert list(written[0]) == list(written[1]) == ["model.onnx", "model.onnx.data"]
    assert written[0]["model.onnx.data"] == written[1]["model.onnx.data"]
    assert_same_graph(*(onnx.load_from_string(files["model.onnx"]) for files in written))


class Stores(nn.Module):
    """Reads large tensors of a type, stored in every way that torch has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = (torch.arange(64 * 48) % 2).to(dtype)
        self.register_buffer("whole", numbers.reshape(64, 48))
        self.register_buffer("turned", numbers.reshape(48, 64).T)
        self.register_buffer("spread", numbers[:48].expand(64, 48))
        self.register_buffer("part", torch.cat([numbers, numbers]).reshape(64, 96)[:, 1::2])
        self.register_buffer("scalar", numbers[1])
        self.register_buffer("empty", numbers[:0].reshape(0, 48))
        self.few = nn.Parameter(numbers[:48].reshape(1, 48), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = (self.whole, self.turned, self.spread, self.part, self.scalar, self.few)
        return x + sum(tensor.float() for tensor in tensors) + self.empty.float().sum()


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool"]
)
def test_torchscript_writes_weights_of_every_type_and_layout_as_torch_does(dtype, tmp_path):
    written = []
    for export in (torch.onnx.export, htp_export.export):
        model = Stores(getattr(torch, dtype)).eval()
        export(
            model, (x(64, 48),), tmp_path / "model.onnx", dynamo=False, do_constant_folding=False
        )
        written.append(onnx.load(str(tmp_path / "model.onnx")))
    assert_same_graph(written[1], written[0])
    assert len(written[1].graph.initializer) == 7


# --- the same return value ---------------------------------------------------


def test_dynamo_gives_a_program_and_torchscript_gives_none(tmp_path):
    model, kwargs = NETS["siblings"].build()
    for path in (tmp_path / "dynamo.onnx", None):
        program = htp_export.export(model, (kwargs["x"],), path, verbose=False)
        assert isinstance(program, torch.onnx.ONNXProgram)
        assert [node.metadata_props["htp.module"] for node in program.model.graph] == [
            "first",
            "second",
            "",
            "",
        ]
        torch.testing.assert_close(program(kwargs["x"])[0], model(kwargs["x"]))
    assert htp_export.export(model, (kwargs["x"],), tmp_path / "script.onnx", dynamo=False) is None
    assert {path.name for path in tmp_path.glob("*.onnx")} == {"dynamo.onnx", "script.onnx"}


# --- models and arguments of every kind ---------------------------------------------------


class Options(Holding, fc=nn.Linear(4, 4)):
    def forward(
        self,
        x: torch.Tensor,
        other: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        twice: bool = False,
    ) -> torch.Tensor:
        y = self.fc(x)
        y = y if other is None else y - other
        y = y if scale is None else y * scale
        return y + y.tanh() if twice else y


def run(model: Any, args: Any, exporter: str, path: Path, **options: Any) -> onnx.ModelProto:
    htp_export.export(
        model, args, path / "model.onnx", dynamo=exporter == "dynamo", verbose=False, **options
    )
    return onnx.load(str(path / "model.onnx"))


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((x(2, 4),), None, []),
        (x(2, 4), None, []),
        ((x(2, 4), x(2, 4)), None, ["Sub"]),
        ((x(2, 4), None), None, []),
        ((x(2, 4),), {"scale": x(2, 4)}, ["Mul"]),
        ((), {"x": x(2, 4), "scale": x(2, 4), "other": x(2, 4)}, ["Sub", "Mul"]),
        ((x(2, 4),), {"twice": True}, ["Tanh", "Add"]),
        ((x(2, 4), None), {"scale": x(2, 4), "twice": True}, ["Mul", "Tanh", "Add"]),
    ],
    ids=["tuple", "tensor", "two", "none", "keyword_only", "keywords", "flag", "all"],
)
def test_dynamo_takes_arguments_of_every_kind(args, kwargs, expected, tmp_path):
    file = run(Options().eval(), args, "dynamo", tmp_path, kwargs=kwargs)
    assert work_of(file) == [("Gemm", ("fc",)), *((op_type, ("",)) for op_type in expected)]


def test_an_exported_program_lists_containers_and_has_owners_in_order_of_execution(tmp_path):
    model, kwargs = NETS["mask_made_in_every_layer"].build()
    file = run(torch.export.export(model, (), kwargs), (), "dynamo", tmp_path)
    layers = tuple(f"layers.{number}" for number in range(3))
    shared = [node for node in nodes_of(file) if owners_of(node) == layers]
    assert {metadata(node)["htp.module"] for node in shared} == {"layers"}
    modules = tree_of(file)
    assert list(modules) == [
        "",
        "layers",
        *(path for layer in layers for path in (layer, f"{layer}.fc")),
    ]
    assert (modules["layers"]["class"], modules["layers"]["calls"]) == ("", 0)
    assert modules["layers.0.fc"]["class"] == "torch.nn.modules.linear.Linear"


class Untraceable(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 100 else -self.fc(x)  # torch.export cannot decide it


@pytest.mark.skipif(not saving.is_late(), reason="torch has had no fallback since 2.11")
@pytest.mark.filterwarnings("ignore")
def test_where_torch_falls_back_to_torchscript_the_file_is_tagged(tmp_path):
    for model, expected in (
        (Untraceable(), ["fc", ""]),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ["0", "1"]),
    ):
        path = tmp_path / "model.onnx"
        with htp_export.tagging():
            torch.onnx.export(
                model.eval(), (x(2, 4),), path, input_names=["x"], fallback=True, verbose=False
            )
        assert [
            metadata(node)["htp.module"] for node in onnx.load(str(path)).graph.node
        ] == expected


def exported_script(kind: str, export: Callable[..., Any], path: Path) -> onnx.ModelProto:
    model, _ = NETS["nested_sequentials"].build()
    script = torch.jit.script(model) if kind == "script" else torch.jit.trace(model, x(2, 4))
    export(script, (x(2, 4),), path / "model.onnx", dynamo=False)
    return onnx.load(str(path / "model.onnx"))


@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:no signature found:UserWarning")
def test_a_script_module_exports_the_same_graph_as_under_torch_with_tags(kind, tmp_path):
    # torch names the nodes of its first one in another way
    exported_script(kind, torch.onnx.export, tmp_path)
    torchs = exported_script(kind, torch.onnx.export, tmp_path)
    ours = exported_script(kind, htp_export.export, tmp_path)
    assert_same_graph(ours, torchs)
    assert untagged(ours) == []
    assert work_of(ours, "Gemm") == [("Gemm", ("0.0.0.0",)), ("Gemm", ("1",))]
    root = tree_of(ours)[""]
    assert (root["fate"], root["calls"]) == ("computed", 1)


# --- what plain TorchScript refuses ---------------------------------------------------


ENCODER = NETS["transformer_encoder"].build


@pytest.mark.parametrize(
    ("make", "outputs"),
    quick(
        [
            (functools.partial(small, "bert"), 2),
            (functools.partial(small, "gpt2", use_cache=True), 5),
            (NETS["multihead_attention"].build, 1),
            (ENCODER, 1),
        ],
        (ENCODER, 1),
    ),
)
def test_torchscript_exports_what_torch_alone_refuses(make, outputs, tmp_path):
    model, kwargs = make()
    model.eval()
    with torch.no_grad():  # as people export; only so does attention take its fast path
        with pytest.raises(Exception):  # noqa: B017, PT011 - each is refused with another error
            torch.onnx.export(model, (), tmp_path / "model.onnx", kwargs=kwargs, dynamo=False)
        file = run(model, (), "torchscript", tmp_path, kwargs=kwargs)
    assert (len(file.graph.output), untagged(file)) == (outputs, [])
    assert len(file.graph.input) == len(kwargs)
    assert file.graph.name == type(model).__name__
    assert set(tree_of(file)) == {path for path, _ in model.named_modules()}


# --- nothing has changed afterwards ---------------------------------------------------


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no export for this one")


class Fails(Holding, fc=nn.Linear(4, 4), act=nn.Sequential(nn.Tanh(), Refuses()), off=nn.Dropout()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x))


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode:UserWarning")
@BOTH
def test_an_export_leaves_the_model_and_torch_as_they_were(exporter, tmp_path):
    model = Fails()
    model.act = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Dropout(), nn.Linear(4, 4)))
    model.train()
    model.act.eval()
    model.act[1].train()
    model.fc.register_forward_hook(lambda *_: None)
    before = state(model)
    htp_export.export(
        model, (x(2, 4),), tmp_path / "m.onnx", dynamo=exporter == "dynamo", verbose=False
    )
    assert changed_since(before, model) == []


@BOTH
def test_a_failed_export_has_the_error_of_torch_names_the_module_and_leaves_all_that_was_there(
    exporter, tmp_path
):
    (tmp_path / "m.onnx").write_bytes(b"what was there")
    model, errors = Fails().eval(), []
    model.off.train()
    for export in (torch.onnx.export, htp_export.export):
        before = state(model)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever torch raises
            export(
                model, (x(2, 4),), tmp_path / "m.onnx", dynamo=exporter == "dynamo", verbose=False
            )
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]).splitlines()[0] == str(errors[1]).splitlines()[0]
    assert [note for note in getattr(errors[1], "__notes__", []) if "'act.1'" in note]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "m.onnx": b"what was there"
    }
    assert changed_since(before, model) == []


# --- tagging() ---------------------------------------------------


def tagged_nodes(export: Callable[..., Any], exporter: str, path: Path) -> int:
    """How many of the two nodes of a small model have tags."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    export(model, (x(2, 4),), str(path), dynamo=exporter == "dynamo", verbose=False)
    return sum("htp.module" in metadata(node) for node in onnx.load(str(path)).graph.node)


class GivesItsInput(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(x), x


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            {"input_names": ["h"], "output_names": ["h", "same"]},
            r"an input and a result of .*\(Gemm\) are both called 'h'",
        ),
        (
            {"input_names": ["h"], "output_names": ["y", "h"]},
            r"an input and a result of .*\(Identity\) are both called 'h'",
        ),
        (
            {"output_names": ["fc.weight", "same"]},
            r"a weight and a result of .* are both called 'fc\.weight'",
        ),
        ({"input_names": ["fc.weight"]}, r"an input and a weight are both called 'fc\.weight'"),
        (
            {"output_names": ["", "same"]},
            r"a result of .*\(Gemm\) that the model returns has no name",
        ),
    ],
    ids=["input", "input_passed_on", "weight", "input_and_weight", "none"],
)
@pytest.mark.parametrize(
    "options",
    every(
        3,
        [
            pytest.param({}, id="data"),
            pytest.param({"external_data": False}, id="one_file"),
            pytest.param({"names": "path"}, id="paths"),
        ],
    ),
)
def test_a_model_of_torch_that_is_not_valid_is_said_to_be_torchs(names, said, options, tmp_path):
    model, file = GivesItsInput().eval(), tmp_path / "model.onnx"
    torch.onnx.export(model, (x(2, 4),), tmp_path / "torch.onnx", verbose=False, **names)
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        onnxruntime.InferenceSession(tmp_path / "torch.onnx")
    file.write_bytes(b"as it was")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        FileError, match=rf"model\.onnx: .*torch\.onnx\.export made is not valid: {said}"
    ):
        htp_export.export(model, (x(2, 4),), file, verbose=False, **names, **options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_program_is_saved_without_a_second_graph_of_its_file(tmp_path, monkeypatch):
    def fails(_: Any) -> None:
        raise AssertionError("the file is read again")

    program = htp_export.export(GivesItsInput().eval(), (x(2, 4),), verbose=False)
    with monkeypatch.context() as patched:
        patched.setattr(onnx_ir, "from_proto", fails)
        program.save(tmp_path / "model.onnx", external_data=True)
    assert htp_export.load(tmp_path / "model.onnx").nodes


@BOTH
def test_tagging_reaches_an_export_that_was_imported_before(exporter, tmp_path):
    path = tmp_path / "model.onnx"
    assert tagged_nodes(imported_before, exporter, path) == 0
    with htp_export.tagging():
        assert tagged_nodes(imported_before, exporter, path) == 2
        assert tagged_nodes(torch.onnx.export, exporter, path) == 2
    assert tagged_nodes(imported_before, exporter, path) == 0


@BOTH
def test_tagging_may_be_nested_and_the_inner_end_ends_nothing(exporter, tmp_path):
    path = tmp_path / "model.onnx"
    before = state()
    with htp_export.tagging():
        with htp_export.tagging():
            assert tagged_nodes(htp_export.export, exporter, path) == 2
        assert tagged_nodes(torch.onnx.export, exporter, path) == 2
    assert tagged_nodes(torch.onnx.export, exporter, path) == 0
    assert changed_since(before) == []


def test_tagging_writes_what_export_writes(tmp_path):
    files = []
    for name, use in (("a", False), ("b", True)):
        model, kwargs = NETS["mask_made_in_every_layer"].build()
        if use:
            with htp_export.tagging():
                torch.onnx.export(model, (), str(tmp_path / name), kwargs=kwargs, dynamo=False)
        else:
            htp_export.export(model, (), str(tmp_path / name), kwargs=kwargs, dynamo=False)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_many_threads_at_once_leave_torch_as_it_was():
    before = state()

    def work() -> None:
        for _ in range(200):
            with htp_export.tagging(), htp_export.tagging():
                pass

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result(60)
    assert changed_since(before) == []


@pytest.fixture(autouse=True)
def fast_path_on() -> Iterator[None]:
    """Every test begins with torch's own default."""
    assert torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(True)
