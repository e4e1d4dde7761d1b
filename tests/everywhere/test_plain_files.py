"""Files of plain ``torch.onnx.export`` in every command: torch's scopes serve, or the error says what to run."""

import contextlib
import io
import warnings
from pathlib import Path

import pytest
import torch

import htp_export
from htp_export.command.commands import command_names
from htp_export.command.main import main
from htp_export.errors import UntaggedModelError
from tests.all_commands import COMMANDS, NAMES, arguments, companions, example

EXACT = (
    "functions",
    "tap",
    "steer",
    "rename",
    "quantize",
    "sensitivity",
    "search",
    "run",
    "carry",
    "bind",
)
"""Commands that need exact tags; for the others, torch's scopes are enough."""


@pytest.fixture(
    scope="module", params=["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp(request.param)
    model, args = example()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, args, folder / "net.onnx", dynamo=request.param == "dynamo", verbose=False
        )
    return {"FILE": str(folder / "net.onnx"), **companions(folder)}


def test_every_command_is_here():
    assert set(command_names()) == NAMES
    assert set(EXACT) < set(COMMANDS)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_torch_scopes_are_named_once_and_serve_or_the_error_says_what_to_run(
    command: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    status = main(arguments(command, files))
    shown = capsys.readouterr()
    words = " ".join((shown.out + " " + shown.err).split())
    assert words.count("read from torch's own scopes") == 1
    assert "no module tags" not in words
    if command in EXACT:
        assert status == 2
        error = " ".join(shown.err.splitlines()[-1].split())
        assert ": the scopes that torch wrote are not exact enough for this; " in error
        assert "htp-export export" in error
        assert "htp-export carry MODEL FILE -o OUT" in error
        assert not list(tmp_path.iterdir())
    else:
        assert status == 0
        assert "error" not in shown.err


@pytest.mark.parametrize(
    "command",
    ["quantize FILE --rule first=int8 --dry-run", "sensitivity FILE --precision int8 --select first --estimate",
     "search FILE --choices 0.5 --trials 2 --select first"],
)  # fmt: skip
def test_what_writes_no_precision_takes_torch_scopes(command, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments(command, files)) == 0


def test_python_warns_once_of_a_model_and_raises(files, caplog):
    tagged = htp_export.load(files["FILE"])
    htp_export.load(tagged.model)
    htp_export.load(tagged.clone().model)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "torch's own scopes" not in str(htp_export.cost(tagged))
    with pytest.raises(
        UntaggedModelError,
        match=r"htp_export\.export\(\.\.\.\) .* htp_export\.carry\(model, file\)",
    ):
        htp_export.contamination(tagged)
    assert len(caplog.records) == 1
