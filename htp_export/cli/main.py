"""``htp-export``: the commands, and what becomes of errors.

Exit status: 0; 1 where a check that was asked for fails or an export fails; 2 where the input cannot be used.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import htp_export
from htp_export.cli.analyze_commands import diff_command, fingerprint_command, forensics_command
from htp_export.cli.carry_command import carry_command, run_command
from htp_export.cli.cost_command import cost_command
from htp_export.cli.export_command import export_command
from htp_export.cli.functions_command import functions_command, inline_command
from htp_export.cli.optimize_command import optimize_command
from htp_export.cli.partition_command import partition_command
from htp_export.cli.profile_command import profile_command
from htp_export.cli.surgery_commands import extract_command, splice_command
from htp_export.cli.terminal import CheckFailed, error_line
from htp_export.cli.tree_command import tree_command
from htp_export.cli.verify_command import compare_command, verify_command
from htp_export.cli.view_command import view_command
from htp_export.errors import InputError

__all__ = ["app", "main"]

app = typer.Typer(
    name="htp-export",
    help="Export PyTorch models to ONNX files whose every node knows its module.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"htp-export {htp_export.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and what libraries log.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if not debug:
        _quiet_libraries()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("export")(export_command)
app.command("functions")(functions_command)
app.command("inline")(inline_command)
app.command("carry")(carry_command)
app.command("run")(run_command)
app.command("tree")(tree_command)
app.command("verify")(verify_command)
app.command("compare")(compare_command)
app.command("cost")(cost_command)
app.command("extract")(extract_command)
app.command("splice")(splice_command)
app.command("profile")(profile_command)
app.command("verify")(verify_command)
app.command("compare")(compare_command)
app.command("partition")(partition_command)
app.command("optimize")(optimize_command)
app.command("forensics")(forensics_command)
app.command("fingerprint")(fingerprint_command)
app.command("diff")(diff_command)
app.command("view")(view_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What was typed after the program's name; ``sys.argv`` where it is None.

    Returns:
        The exit status.

    Example:
        >>> main(["tree", "nowhere.onnx"])
        2
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with warnings.catch_warnings():
            status = app(args=arguments, prog_name="htp-export", standalone_mode=False)
    except CheckFailed as failed:
        error_line(str(failed))
        return 1
    except InputError as error:
        if "--debug" in arguments:
            traceback.print_exception(error)
        error_line(str(error))
        return 2
    except KeyboardInterrupt:
        error_line("interrupted")
        return 130
    except Exception as error:
        # Usage errors of typer, which comes with its own copy of click or uses the installed one, by its version.
        shown = getattr(error, "format_message", None)
        if shown is None:
            raise
        error_line(" ".join(shown().split()))
        return 2
    return status if isinstance(status, int) else 0


def _quiet_libraries() -> None:
    """Leave the terminal to the commands: libraries warn their own developers, at length."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torch.onnx._internal", "torch.export", "transformers", "huggingface_hub", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
