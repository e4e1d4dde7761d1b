"""``export_plan``: a plan as the file that another tool reads."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from htp_export.capabilities.quantize.planned import PlannedModel, TargetFile
from htp_export.capabilities.quantize.precisions import precisions_of
from htp_export.capabilities.quantize.serving import Serving
from htp_export.discovery import names_in
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.files.targets import Kind, check_target
from htp_export.files.text_files import write_text
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource
from htp_export.plans.rules import assigned
from htp_export.results.result import Result

_FOLDER = "htp_export.capabilities.quantize.targets"


def targets() -> list[str]:
    """The tools that plans are written for: the files of ``targets``."""
    return names_in(_FOLDER)


@dataclass(frozen=True)
class PlanFile(Result):
    """The result of `export_plan`.

    Attributes:
        to: The tool.
        content: What the tool reads: plain data, written as JSON.
        nodes: Name of a precision → nodes that have it.
        notes: What to do with the file, and what the tool cannot be told, a line each.
        file: The file that was written; None without one.
    """

    to: str
    content: Mapping[str, Any]
    nodes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    file: str | None = None

    @property
    def text(self) -> str:
        """The contents of the file."""
        return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"

    @property
    def summary(self) -> str:
        """The result in one line."""
        listed = ", ".join(f"{count} nodes {name}" for name, count in self.nodes.items())
        return f"plan for {self.to}: {listed}"


@names_model_faults("model")
def export_plan(
    model: ModelSource,
    plan: Mapping[str, Any] | str,
    output: str | os.PathLike[str] | None = None,
    *,
    to: str,
) -> PlanFile:
    """Write a plan as the file that another tool reads. The tool need not be installed.

    ==============  ================================================================================================
    ``"ort"``       JSON: arguments of ``quantize_static``, ``quantize_dynamic`` and ``MatMulNBitsQuantizer``
    ``"nncf"``      JSON: arguments of ``nncf.quantize`` and ``nncf.compress_weights``, with ignored scopes
    ``"modelopt"``  JSON: arguments of ``modelopt.onnx.quantization.quantize``
    ``"genai"``     JSON: ``target_options`` of ONNX Runtime GenAI's model builder
    ``"olive"``     JSON: passes of ``olive run``
    ==============  ================================================================================================

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        plan: Selector → precision, in order, or a precision for the whole model; as for ``quantize``.
        output: The file to write; None for none.
        to: The tool.

    Returns:
        The contents of the file as ``.content`` and ``.text``, and notes on what to do with it.

    Raises:
        InputError: The plan has a precision that the tool does not have, or a node cannot be named.
        SelectorError: A selector cannot be read or matches no module.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> plan = htp_export.export_plan(program, {"0": "int8"}, to="ort")
        >>> plan.content["steps"][0]["arguments"]["nodes_to_quantize"]
        ['node_linear']
    """
    check_target(output, Kind.JSON)
    if to not in targets():
        raise InputError(f"plans are written for {', '.join(targets())}, not for {to!r}")
    tagged = read_flat(model)
    serving = Serving(tagged)
    rules = serving.rules(precisions_of(plan))
    planned = PlannedModel(tagged, assigned(tagged, rules).nodes, rules)
    planned.check_names()
    target = import_module(f"{_FOLDER}.{to}")
    planned.check(to, target.EXPRESSED)
    written: TargetFile = target.plan_file(planned)
    counts = Counter(str(precision) for precision in planned.precisions.values())
    notes = (*serving.notes, *written.notes)
    result = PlanFile(to, written.content, dict(counts), notes, None if output is None else os.fspath(output))
    if output is not None:
        write_text(output, result.text, Kind.JSON)
    return result
