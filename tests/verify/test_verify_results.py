"""Verify: which tensors of a file a module returned, where it returns sizes too, or the file does not name them."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from tests import faults
from tests.exporting import exported
from tests.nets import EXPORTERS, spread, x

BOTH = pytest.mark.parametrize("exporter", EXPORTERS)
MODES = pytest.mark.parametrize("isolated", [False, True], ids=["whole", "isolated"])


class Sized(nn.Module):
    """Returns a tensor, one that nothing reads, and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
        y = self.proj(x)
        z = y * 2
        return z.flatten(2).transpose(1, 2), y + 1, z.shape[2:]


class ReturnsSizes(nn.Module):
    """A module whose sizes another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = Sized(), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, _, (height, width) = self.embed(x)
        out: torch.Tensor = self.fc(tokens).transpose(1, 2).reshape(x.shape[0], -1, height, width)
        return out


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return spread(ReturnsSizes()).eval()


@pytest.fixture(scope="module")
def files(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    """Of each exporter, a file whose heights and widths are open."""
    open_sizes = torch.export.Dim.DYNAMIC
    options: dict[str, dict[str, Any]] = {
        "dynamo": {"dynamic_shapes": {"x": {2: open_sizes, 3: open_sizes}}},
        "torchscript": {"input_names": ["x"], "dynamic_axes": {"x": {2: "height", 3: "width"}}},
    }
    folders = {exporter: tmp_path_factory.mktemp(exporter) for exporter in EXPORTERS}
    return {each: exported(net, {"x": x(2, 3, 8, 6)}, each, folders[each], **options[each]) for each in EXPORTERS}


def stripped(file: onnx.ModelProto) -> onnx.ModelProto:
    """The file without the names of what modules return, and without types of tensors, as tools leave it."""
    bare = onnx.ModelProto()
    bare.CopyFrom(file)
    kept = [entry for entry in file.metadata_props if entry.key != "htp.signatures"]
    del bare.metadata_props[:]
    bare.metadata_props.extend(kept)
    del bare.graph.value_info[:]
    return bare


@BOTH
@MODES
def test_sizes_that_a_module_returns_are_taken_for_no_tensor(net, files, exporter, isolated):
    for file in (stripped(files[exporter]), files[exporter]):
        result = htp_export.verify(net, file, kwargs={"x": x(2, 3, 4, 10)}, isolated=isolated)
        assert result.ok, result
        (call,) = result.modules["embed"].calls
        assert [output.name for output in call.outputs] == ["0"]
        assert call.outputs[0].difference.max_abs < 1e-5
        assert call.missing == 1  # the second one is read by nobody, and is not in the file
    assert result.modules["embed"].reason == "1 of its outputs are not in the file"


@BOTH
def test_a_fault_in_a_module_that_returns_sizes_is_found(net, files, exporter):
    for file in (files[exporter], stripped(files[exporter])):
        tagged = htp_export.load(file)
        faults.weight_changed(tagged, "embed.proj")
        result = htp_export.verify(net, tagged, kwargs={"x": x(2, 3, 4, 10)})
        assert result.first_wrong == "embed.proj"
        assert result.modules["embed"].status == "inherits"


class Twins(nn.Module):
    """Returns two tensors of one shape, with a size between them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x.exp(), x.shape[1], x.sigmoid()


class UsesTwins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, size, other = self.twins(x)
        return one.reshape(size, -1) @ other


@BOTH
def test_each_tensor_beside_a_size_is_compared_with_its_own(tmp_path, exporter):
    model = spread(UsesTwins()).eval()
    result = htp_export.verify(model, exported(model, {"x": x(3, 3)}, exporter, tmp_path), kwargs={"x": x(3, 3)})
    assert result.ok, result
    (call,) = result.modules["twins"].calls
    assert [output.name for output in call.outputs] == ["0", "1"]
    assert call.missing == 0
    assert result.modules["twins"].reason == ""
