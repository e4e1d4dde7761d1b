"""The Python of ``--entry``, for ``--as-python``: the lines that create a model and its inputs."""

from __future__ import annotations

from collections.abc import Mapping

from htp_export.command.as_python import Preparation, Written
from htp_export.command.model_options import ModelOptions, SourceCall, call_entry


def prepare_entry(program: Preparation, options: ModelOptions) -> SourceCall:
    """Write the lines for the model of a factory; return the call with its example inputs.

    The factory is called: whether it returns a tuple or a dict decides how its inputs are passed.
    """
    entry = str(options.entry)
    call = call_entry(entry, options.seed)
    module, _, factory = entry.partition(":")
    program.imports |= {"torch": [], module: [factory.partition(".")[0]]}
    program.lines += [f"torch.manual_seed({options.seed})", f"model, inputs = {factory}()"]
    if not isinstance(call.returned, tuple | list | Mapping):
        program.lines.append("inputs = (inputs,)")
    program.lines.append("model.eval()")
    program.arguments["model"] = Written("model")
    if isinstance(call.returned, Mapping):
        program.arguments["kwargs"] = Written("inputs")
    else:
        program.arguments["args"] = Written("inputs")
        program.left_out.append("kwargs")
    return call
