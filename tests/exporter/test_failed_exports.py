"""An export that fails says where in the model, what to do, and which command to try next."""

import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from tests.exporting import BOTH
from tests.nets import Holding
from tests.traceless import line_of


class Solves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0]


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(3, 5)


class Net(Holding, fc=nn.Linear(4, 4)):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](self.fc(x))


def solves():
    return Net(Solves()).eval(), (torch.randn(4, 4),)


def decides():
    return Net(Decides()).eval(), (torch.randn(4, 4),)


def fails():
    return Net(Fails()).eval(), (torch.randn(4, 4),)


CASES = [
    ("solves", Solves, "linalg.qr", "dynamo", "no translation of this operator"),
    ("solves", Solves, "linalg.qr", "torchscript", "no translation of this operator"),
    ("decides", Decides, "x.sum() > 0", "dynamo", "use torch.cond"),
    ("fails", Fails, "reshape", "dynamo", "run the model on these inputs"),
    ("fails", Fails, "reshape", "torchscript", "run the model on these inputs"),
]


@pytest.mark.parametrize(("name", "kind", "text", "exporter", "remedy"), CASES)
def test_the_command_names_the_module_the_line_a_remedy_and_the_next_command(
    name, kind, text, exporter, remedy, tmp_path, capfd
):
    entry = f"{__name__}:{name}"
    target = tmp_path / "net.onnx"
    target.write_bytes(b"before")
    assert main(["export", "--entry", entry, f"--{exporter}", "-o", str(target), "--force"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    # torch's loggers write before it
    message = err[err.index("htp-export: error:") :]
    first, place, *others = message.splitlines()
    assert first.startswith("htp-export: error: the export failed: ")
    code = line_of(kind.forward, text)
    assert place.startswith(f"  in module 'parts.0' ({__file__}:{code}): ")
    assert text in place
    assert remedy in others[0]
    assert others[-1].startswith(f"  next: htp-export tree --entry {entry} shows")
    other = "--torchscript" if exporter == "dynamo" else "--dynamo"
    assert other in others[0] or name == "decides"
    assert target.read_bytes() == b"before"


@BOTH
def test_in_python_the_notes_of_torchs_own_error_say_it(exporter, tmp_path):
    model, args = solves()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's own
        htp_export.export(
            model, args, tmp_path / "net.onnx", dynamo=exporter == "dynamo", verbose=False
        )
    place, _, following = caught.value.__notes__[:3]
    assert place.startswith(f"htp_export: in module 'parts.0' ({__file__}:")
    assert following.startswith("htp_export: next: htp_export.inspect(model, args)")


def test_the_next_command_shows_the_rest(capsys):
    assert main(["tree", "--entry", f"{__name__}:solves"]) == 0
    assert "parts.0" in capsys.readouterr().out


def test_carry_says_it_too(tmp_path, capsys):
    file = tmp_path / "net.onnx"
    htp_export.export(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), file, verbose=False)
    typed = ["carry", "--entry", f"{__name__}:solves", str(file), "-o", str(tmp_path / "o.onnx")]
    assert main(typed) == 1
    error = capsys.readouterr().err
    assert "the export failed" in error
    assert "in module 'parts.0'" in error
    assert "next: htp-export tree --entry" in error
