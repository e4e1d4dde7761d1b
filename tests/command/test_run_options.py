"""The options of runs: one group for all commands that run a model, and options that two groups have."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from htp_export.command import main as program
from htp_export.command.commands import command_names, flattened
from htp_export.command.run_options import InputOptions, RunOptions

HELP = "Open sizes."


@dataclass(frozen=True)
class Sized:
    """Options with a size that other groups have, too."""

    dims: Annotated[str | None, HELP] = None
    name: Annotated[str, "A name."] = "net"


@dataclass(frozen=True)
class Timed:
    """More options, with the same size."""

    dims: Annotated[str | None, HELP] = None
    runs: Annotated[int, "Number of runs."] = 1


@dataclass(frozen=True)
class Other:
    """The same option with another help."""

    dims: Annotated[str | None, "Shapes."] = None


def test_an_option_of_two_groups_is_one_option_and_both_have_its_value():
    got: list[tuple[Sized, Timed]] = []

    def command(sized: Sized, timed: Timed) -> None:
        got.append((sized, timed))

    app = typer.Typer()
    app.command()(flattened(command))
    result = CliRunner().invoke(app, ["--dims", "batch=2", "--runs", "3"])
    assert result.exit_code == 0, result.output
    assert got == [(Sized("batch=2", "net"), Timed("batch=2", 3))]


def test_groups_that_declare_an_option_differently_are_refused():
    def command(sized: Sized, other: Other) -> None:
        pass

    with pytest.raises(ValueError, match="duplicate parameter name: 'dims'"):
        flattened(command)


def helps() -> dict[str, dict[str, Any]]:
    """Option → command → its help."""
    group = typer.main.get_command(program.app)
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name in command_names():
        if " " in name:
            continue
        for parameter in group.get_command(None, name).params:  # type: ignore[attr-defined]
            found[str(parameter.name)][name] = getattr(parameter, "help", None)
    return found


def test_every_command_that_runs_a_model_has_the_same_options():
    options = helps()
    # These measure on the user's inputs alone, never on random ones.
    del options["data"]["bind"], options["data"]["prune"]
    running = set(options["data"])
    assert {"cost", "compare", "optimize", "place", "profile", "quantize", "search"} <= running
    for name in ("data", "dims", "shapes"):
        assert running <= set(options[name])
        assert len(set(options[name].values())) == 1
    assert len(set(options["provider"].values())) == 1
    seeds = {options["seed"][name] for name in running - {"place", "profile"}}
    assert seeds == {
        "Of random inputs.",
        "Of the sampler, and of random inputs.",
        "Of random weights and inputs: the same seed gives the same.",
    }


def test_the_options_are_the_arguments_of_a_function():
    inputs = InputOptions(["a.npz"], ["batch=2,length=8"])
    assert inputs.keywords == {
        "data": "a.npz",
        "dims": {"batch": 2, "length": 8},
        "shapes": {},
    }
    assert RunOptions(["a.npz", "b.npz"], seed=3).keywords == {
        "data": ["a.npz", "b.npz"],
        "dims": {},
        "shapes": {},
        "seed": 3,
    }
