"""Every result, at a prompt and in a notebook, and what it says of a module that it does not have."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import htp_export
from htp_export import results
from htp_export.command.main import main
from htp_export.errors import InputError, UnknownModuleError
from htp_export.format import tags
from htp_export.results.columns import Column
from htp_export.results.result import Modules, Result
from htp_export.results.tables import ModuleTable
from tests.all_commands import COMMANDS, arguments, companions, example

MOST = 500  # characters that a prompt shows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of all commands, and of functions without one, of a net with HTML in a name: class → results."""
    folder = tmp_path_factory.mktemp("results")
    model, args = example()
    files = {"FILE": str(folder / "net.onnx"), **companions(folder)}
    tagged = htp_export.load(htp_export.export(model, args, verbose=False))
    found: dict[str, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        wrapped = Result.__post_init__

        def noted(result: Any) -> None:
            wrapped(result)
            found.setdefault(type(result).__name__, []).append(result)

        patch.setattr(Result, "__post_init__", noted)
        patch.chdir(folder)
        tagged.model.metadata_props[tags.MODULES] = tagged.model.metadata_props[tags.MODULES].replace(
            "linear.Linear", "<script>"
        )
        tagged.save(files["FILE"])
        for command in COMMANDS:
            typed = arguments(command, files)
            main([*typed, "--json"] if command == "pipeline" else typed)
        main(["lora", "insert", files["FILE"], "first", "-o", "lora.onnx"])
        main(["lora", "adapter", "lora.onnx", files["ADAPTER"], "-o", "lora.onnx_adapter"])
        htp_export.attention_report(torch.nn.MultiheadAttention(4, 2).eval(), tuple(torch.randn(3, 2, 2, 4)))
        htp_export.inspect(model, args)
        program = htp_export.export(model, args, verbose=False)
        htp_export.contamination(program)
        htp_export.verify(model, program, args)
    return found


RESULTS = [name for name in results.__all__ if issubclass(getattr(results, name), Result)]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_short_at_a_prompt_and_a_table_in_a_notebook(name, made):
    for result in made[name]:
        assert repr(result).startswith(f"{name}: ")
        assert len(repr(result)) <= MOST
        assert "\n" not in repr(result)
        drawn = result._repr_html_()
        assert drawn.startswith("<")
        assert "<script>" not in drawn or name == "View"
        assert result.table() is None or str(result).count("\n") == 0 or len(drawn) > len(repr(result))


@pytest.mark.parametrize("name", RESULTS)
def test_a_module_that_a_result_does_not_have_is_an_error_with_the_nearest(name, made):
    for result in made[name]:
        modules = getattr(result, "modules", None)
        if isinstance(modules, dict) and modules:
            path = max(modules, key=len)
            assert isinstance(modules, Modules)
            assert len(repr(modules)) <= MOST
            with pytest.raises(UnknownModuleError, match="no module .* in this result" + f".*{path!r}" * bool(path)):
                modules[f"{path}9"]


def test_every_result_by_module_is_among_them(made):
    by_module = {name for name, found in made.items() if isinstance(getattr(found[0], "modules", None), Modules)}
    assert {"Cost", "Profile", "Comparison", "Verification", "Quantized", "Pruned", "Placed", "ModelMap"} <= by_module


def test_numbers_of_modules_are_found_by_name_in_every_table(made):
    [cost, *_] = made["Cost"]
    assert cost.by_path() == cost.by_path("flops")
    assert cost.by_path()["first"] == 2 * 2 * 32 * 32
    assert made["Quantized"][0].by_path("bytes_before")["first"] == 4 * 33 * 32
    with pytest.raises(InputError, match=r"modules of Cost have no number 'flop'; there are .*flops"):
        cost.by_path("flop")


@dataclass(frozen=True)
class Counted(ModuleTable):
    """Numbers of modules."""

    columns = (Column("count", "count"),)
    modules: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """A long one."""
        return "many " * 1000


def test_a_long_table_in_a_notebook_and_a_long_summary_at_a_prompt_are_cut():
    counted = Counted({f"fc.{k}": SimpleNamespace(path=f"fc.{k}", count=k) for k in range(2000)})
    assert len(repr(counted)) < MOST
    assert repr(counted.modules) == "<2000 modules: 'fc.0', 'fc.1', 'fc.2', …>"
    assert counted._repr_html_().count("<tr>") == 401
    assert "and 1600 more lines" in counted._repr_html_()
    assert counted.by_path("count")["fc.3"] == 3
