"""A fault in the capture is named, or leaves an export untagged; errors of the model and of torch stay their own."""

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import CaptureError, TorchChangedError, UntaggedExportWarning
from htp_export.exporter import capture_session, exporting
from htp_export.exporter.capture import (
    dynamo_patches,
    patches,
    saving,
    torch_internals,
    torchscript,
    torchscript_patches,
)
from htp_export.exporter.capture.decomposition import Decomposition
from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.fx_calls import FxCalls
from htp_export.exporter.capture.jit_calls import Trace
from htp_export.exporter.capture.jit_rewriting import Translation
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.patching import Patch
from htp_export.exporter.capture.root_module_call import FormattedCall
from htp_export.exporter.capture.torchscript import TorchScriptCapture
from htp_export.files.protobuf_bytes import SerializedModel
from tests.exporting import BOTH, every, exported_net, quick
from tests.nets import EXPORTERS, NETS, Holding, x


class Block(Holding, fc=nn.Linear(8, 8), norm=nn.LayerNorm(8)):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(self.norm(self.fc(x)) + x)
        y = torch.cat([y, y], 1)[:, :8]
        return y if scale is None else y * scale


class Net(Holding, first=Block(), second=Block(), large=nn.Linear(8, 64)):
    """Calls a module twice, has a body that torch dissolves, and a weight that is left out of the bytes."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            x = self.first(x)
        return {"y": self.large(self.second(self.first(x), scale=scale))}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


INPUTS = (torch.linspace(-1, 1, 16).reshape(2, 8), torch.linspace(1, 2, 8))

# Where the fault is, and what the error says was being done.
DYNAMO = [
    (ModuleNames, "__init__", "reading the names"),
    (FxCalls, "enter", "a module is called"),
    (FxCalls, "leave", "a module returns"),
    (DynamoCapture, "exported", "reading the exported program"),
    (dynamo_patches, "watch_bodies", "bodies of the exported program"),
    (torch_internals, "fx_tracing", "the FX trace"),
    (torch_internals, "executed_since", "through its decomposition"),
    (Decomposition, "record", "through its decomposition"),
    (Decomposition, "finish", "reading the decomposed program"),
    (DynamoCapture, "translated_nodes", "ONNX values of an FX graph"),
    (DynamoCapture, "translated", "ONNX graph as it was translated"),
    (DynamoCapture, "converted", "after the opset was converted"),
    (DynamoCapture, "replaced", "a value that the optimiser replaced"),
    (DynamoCapture, "finish", "matching the nodes of the ONNX graph"),
    (capture_session, "make_tags", "finding the owners"),
]
TORCHSCRIPT = [
    (ModuleNames, "__init__", "reading the names"),
    (Trace, "enter", "a module is called"),
    (Trace, "leave", "a module returns"),
    (FormattedCall, "numbers", "which arguments are numbers"),
    (TorchScriptCapture, "traced", "reading the traced graph"),
    (TorchScriptCapture, "before_translation", "before its translation"),
    (Translation, "node", "the translation of an operator"),
    (TorchScriptCapture, "translated", "ONNX graph as it was translated"),
    (TorchScriptCapture, "renumbered", "matching values of a graph with those of its copy"),
    (TorchScriptCapture, "named", "the finished ONNX graph"),
    (torchscript_patches, "empty_weights", "weights to leave out"),
    (saving, "stored", "keeping the weights"),
    (torchscript, "SerializedModel", "tagging the nodes of the file"),
    (TorchScriptCapture, "tagged", "tagging the nodes of the file"),
    (TorchScriptCapture, "finish", "matching the nodes of the ONNX graph"),
    (capture_session, "make_tags", "finding the owners"),
    (SerializedModel, "chunks", "tagging the nodes of the file"),
]
# Of the steps of a dynamo export one of each part of it; an export by TorchScript takes a tenth of the time.
QUICK = ("enter", "watch_bodies", "record", "replaced", "make_tags")
CASES = [
    pytest.param(
        exporter, *fault, id=f"{exporter}-{fault[0].__name__.rpartition('.')[2]}.{fault[1]}",
        marks=() if exporter == "torchscript" or fault[1] in QUICK else pytest.mark.slow,
    )
    for exporter, faults in (("dynamo", DYNAMO), ("torchscript", TORCHSCRIPT))
    for fault in faults
]  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a step of the capture fail."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr(owner, name, fails)


def options(exporter: str) -> dict[str, Any]:
    return {
        "dynamo": exporter == "dynamo",
        "verbose": False,
        "opset_version": 18,
        "external_data": False,
    }


def described(file: Path) -> onnx.ModelProto:
    """A file without the places in our sources, which torch writes down with the stack of each node."""
    model = onnx.load(str(file))
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    return model


@contextlib.contextmanager
def untagged(match: str) -> Iterator[None]:
    """One warning says that there are no tags; what torch warns of at length is not looked at."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UntaggedExportWarning)
        yield
    [message] = [str(each.message) for each in said]
    assert re.search(match, message), message


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of torch's own export; where torch has no way to call the model, of a tagged one."""
    found = {}
    for exporter in ("dynamo", "torchscript"):
        found[exporter] = tmp_path_factory.mktemp(exporter) / "model.onnx"
        torch.onnx.export(net(), INPUTS, found[exporter], **options(exporter))
    return found


@pytest.mark.parametrize(
    ("exporter", "owner", "name", "seam"), [CASES[1], CASES[14], *CASES[16::4]]
)
def test_a_fault_says_what_was_being_done_and_writes_nothing(
    exporter, owner, name, seam, tmp_path, monkeypatch
):
    plant(monkeypatch, owner, name)
    with pytest.raises(CaptureError, match=seam) as caught:
        htp_export.export(net(), INPUTS, tmp_path / "model.onnx", **options(exporter))
    for part in ("zip() argument 2 is shorter", "report", "tagging(strict=False)"):
        assert part in str(caught.value)
    assert seam in caught.value.seam
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(("exporter", "owner", "name", "seam"), every(2, CASES))
def test_a_fault_leaves_torchs_own_file_if_that_is_allowed(
    exporter, owner, name, seam, plain, tmp_path, monkeypatch
):
    file = tmp_path / "model.onnx"
    plant(monkeypatch, owner, name)
    with htp_export.tagging(strict=False), untagged(seam):
        torch.onnx.export(net(), INPUTS, file, **options(exporter))
    if exporter == "torchscript":
        assert file.read_bytes() == plain[exporter].read_bytes()
    assert described(file) == described(plain[exporter])
    assert list(tmp_path.iterdir()) == [file]


def test_export_inside_tagging_that_is_not_strict_is_not_strict(tmp_path, monkeypatch):
    monkeypatch.setattr(capture_session, "make_tags", None)
    with htp_export.tagging(strict=False), untagged("finding the owners"):
        htp_export.export(net(), INPUTS, tmp_path / "model.onnx", **options("torchscript"))
    with htp_export.tagging(strict=False), htp_export.tagging(), pytest.raises(CaptureError):
        htp_export.export(net(), INPUTS, tmp_path / "model.onnx", **options("torchscript"))


@BOTH
def test_a_fault_in_one_export_is_none_in_the_next(exporter, tmp_path, monkeypatch):
    with htp_export.tagging(strict=False):
        with monkeypatch.context() as planted, untagged("finding the owners"):
            planted.setattr(capture_session, "make_tags", None)
            torch.onnx.export(net(), INPUTS, tmp_path / "one.onnx", **options(exporter))
        torch.onnx.export(net(), INPUTS, tmp_path / "other.onnx", **options(exporter))
    assert len(htp_export.load(tmp_path / "other.onnx")["first.fc"].nodes) == 2


class FullDisk(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError("no space left")


@pytest.mark.parametrize("strict", [True, False])
def test_an_error_of_the_file_is_no_fault_of_the_capture(strict):
    with htp_export.tagging(strict=strict), pytest.raises(OSError, match="no space left"):
        torch.onnx.export(net(), INPUTS, FullDisk(), **options("torchscript"))


class Raises(Holding, fc=nn.Linear(8, 8)):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for _ in zip(self.fc(x), [1], strict=True):
            pass
        return x


@pytest.mark.filterwarnings("ignore:Iterating over a tensor:torch.jit.TracerWarning")
@pytest.mark.parametrize("strict", [True, False])
@BOTH
def test_an_error_of_the_model_is_no_fault_of_the_capture(exporter, strict, tmp_path):
    raised = []
    for tagged in (False, True):
        watching = htp_export.tagging(strict=strict) if tagged else contextlib.nullcontext()
        with watching, pytest.raises(Exception, match=r"zip\(\) argument 2 is shorter") as caught:
            torch.onnx.export(Raises().eval(), INPUTS, tmp_path / "model.onnx", **options(exporter))
        raised.append(type(caught.value))
        assert not isinstance(caught.value, CaptureError)
    assert raised[0] is raised[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strict", [True, False])
@BOTH
def test_an_error_of_torch_is_no_fault_of_the_capture(exporter, strict, tmp_path, monkeypatch):
    for group in patches.EVERY:
        for patch in group.patches:
            if patch.name in ("_translate_fx_graph", "_run_symbolic_function"):
                owner, name, _ = patch.find()
                plant(monkeypatch, owner, name)
    with (
        htp_export.tagging(strict=strict),
        pytest.raises(Exception, match="argument 2 is shorter") as caught,
    ):
        torch.onnx.export(net(), INPUTS, tmp_path / "model.onnx", **options(exporter))
    assert not isinstance(caught.value, CaptureError)


@BOTH
def test_a_torch_that_changed_is_named_or_exports_untagged_if_that_is_allowed(
    exporter, plain, tmp_path, monkeypatch
):
    group = patches.DYNAMO if exporter == "dynamo" else patches.TORCHSCRIPT
    monkeypatch.setattr(
        group, "patches", (*group.patches, Patch("torch.onnx", "moved_away", lambda given: given))
    )
    before = [
        patch.find()[2]
        for group in patches.EVERY
        for patch in group.patches
        if patch.name != "moved_away"
    ]
    with pytest.raises(TorchChangedError, match=r"torch\.onnx\.moved_away"):
        htp_export.export(net(), INPUTS, tmp_path / "model.onnx", **options(exporter))
    after = [
        patch.find()[2]
        for group in patches.EVERY
        for patch in group.patches
        if patch.name != "moved_away"
    ]
    assert after == before
    assert list(tmp_path.iterdir()) == []
    with htp_export.tagging(strict=False), untagged(r"torch\.onnx\.moved_away is gone"):
        torch.onnx.export(net(), INPUTS, tmp_path / "model.onnx", **options(exporter))
    assert described(tmp_path / "model.onnx") == described(plain[exporter])


def test_an_exporter_that_cannot_be_watched_is_said_when_tagging_begins(monkeypatch):
    gone = (Patch("torch.onnx", "moved_away", lambda given: given),)
    monkeypatch.setattr(patches.TORCHSCRIPT_ENTRY, "patches", gone)
    with pytest.raises(TorchChangedError), htp_export.tagging():
        pass
    with untagged("moved_away"), htp_export.tagging(strict=False):
        program = torch.onnx.export(nn.ReLU().eval(), (torch.ones(2),), dynamo=True, verbose=False)
    assert program is not None
    assert program.model.metadata_props["htp.version"] == "1"


def test_the_warning_is_an_error_where_warnings_are():
    """Those who want neither an untagged file nor a CaptureError can say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntaggedExportWarning)
        fault = CaptureError("x", ValueError("y"))
        with pytest.raises(UntaggedExportWarning, match="without module tags"):
            exporting.export_untagged(fault)


# --- warnings that torch shows, and one more if it writes another opset than was asked for ---


def seen(
    export: Callable[..., Any], exporter: str, name: str, folder: Path
) -> list[tuple[type[Warning], str]]:
    """Category and text of every warning that an export shows, in order."""
    model, kwargs = NETS[name].build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(
            model,
            (),
            folder / "model.onnx",
            kwargs=kwargs,
            dynamo=exporter == "dynamo",
            verbose=False,
        )
    return [(warning.category, str(warning.message)) for warning in caught]


NAMES = ("siblings", "conv_bn_relu", "other_names_of_operators", "lstm")


@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        itertools.product(NAMES, EXPORTERS),
        *((name, "torchscript") for name in NAMES),
        ("conv_bn_relu", "dynamo"),
    ),
)
def test_an_export_shows_the_warnings_of_torch_alone(name, exporter, tmp_path):
    torchs = seen(torch.onnx.export, exporter, name, tmp_path)
    # the warning of torch about its own use of LeafSpec is hidden: no user can act on it
    shown = [(category, text) for category, text in torchs if "LeafSpec" not in text]
    assert seen(htp_export.export, exporter, name, tmp_path) == shown
    # From 2.14 on, torch.jit.trace warns. torch's exporter does not call it for models like these.
    assert FutureWarning not in {category for category, _ in torchs if exporter == "torchscript"}


def test_a_trace_warns_where_the_user_makes_it_and_not_again_in_the_export(tmp_path):
    model, _ = NETS["nested_sequentials"].build()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        traced = torch.jit.trace(model, x(2, 4))

    def shown(export: Callable[..., Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            export(traced, (x(2, 4),), tmp_path / "model.onnx", dynamo=False)
        return [str(warning.message) for warning in caught]

    assert shown(htp_export.export) == shown(torch.onnx.export)


class NeverExported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the export has begun")


@BOTH
@pytest.mark.parametrize("opset", [0, 5, 999])
def test_an_opset_that_torch_cannot_write_is_refused_before_the_export(exporter, opset, tmp_path):
    file = tmp_path / "model.onnx"
    message = rf"opset {opset}: torch's (?i:{exporter}) exporter writes opsets \d+ to \d+"
    with pytest.raises(htp_export.InputError, match=message):
        htp_export.export(
            NeverExported(),
            (torch.randn(2),),
            file,
            opset_version=opset,
            dynamo=exporter == "dynamo",
            verbose=False,
        )
    assert not file.exists()


def test_a_warning_names_both_opsets_if_torch_writes_another_one(tmp_path: Path) -> None:
    # torch's converter cannot go down to 7, and only logs that.
    model, kwargs = NETS["siblings"].build()
    with pytest.warns(
        UserWarning, match="opset 7 was asked for, and torch wrote opset 18"
    ) as warned:
        program = htp_export.export(
            model, (), tmp_path / "model.onnx", kwargs=kwargs, opset_version=7, verbose=False
        )
    assert program.model.opset_imports[""] == 18
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 18
    assert next(each for each in warned if "opset 7" in str(each.message)).filename == __file__


@pytest.mark.long
@pytest.mark.parametrize(
    ("exporter", "opset"), [("dynamo", 18), ("dynamo", 20), ("torchscript", 11), ("dynamo", None)]
)
def test_nothing_is_said_of_an_opset_that_is_written(exporter, opset, tmp_path):
    # warnings are errors in tests
    file = exported_net("siblings", exporter, tmp_path, opset_version=opset)
    assert opset in (None, file.opset_import[0].version)
