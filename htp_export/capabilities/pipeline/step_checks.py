"""What is wrong with the options of steps, as far as it can be said before the first step runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.pipeline.pipeline_steps import PipelineStep, blamed
from htp_export.capabilities.pipeline.step_options import is_repeatable, texts_in
from htp_export.errors import FileError, HtpExportError, InputError
from htp_export.format import tags
from htp_export.model.tagged import TaggedModel, load
from htp_export.plans.rules import modules_within
from htp_export.process.argument_types import check_type
from htp_export.process.quiet import quiet

_BY_SELECTOR = ("plan", "tolerances")
"""Options that are mappings from selectors."""


def check_values(steps: Sequence[PipelineStep], start: Callable[[], TaggedModel]) -> None:
    """Check the values of options: types, files, modules, and what each function checks of its own arguments.

    Modules are looked for in the model that the pipeline begins with, up to the first step that adds or removes some;
    ``start`` reads that model, and is called only if an option names modules.
    """
    from htp_export.capabilities.carry import adapters as tools

    keeps_modules = True
    for index, step in enumerate(steps):
        given = {name: value for name, value in step.options.items() if value is not None}
        for name, value in given.items():
            with blamed(index, step, name):
                _check_value(step, name, value)
            if keeps_modules:
                _check_modules(index, step, name, value, start)
        for check in step.kind.check_functions:
            _run_check(check, index, step, given)
        if step.name in tools.__all__ and is_repeatable(step.written):
            with blamed(index, step):
                _try_tool(step)
        keeps_modules = keeps_modules and step.kind.keeps_modules


def _check_value(step: PipelineStep, name: str, value: Any) -> None:
    """Check the type of a value, and the files that it names."""
    kind = step.kind.takes(name)
    check_type(name, value, kind)
    if kind is None or not step.kind.takes_file(name):
        return
    for text in texts_in(value):
        if "ModelProto" in repr(kind):
            load(text)
        elif not Path(text).exists():
            raise FileError(text, "there is no such file")


def _check_modules(index: int, step: PipelineStep, name: str, value: Any, start: Callable[[], TaggedModel]) -> None:
    """Check the selectors of an option, and the path of `splice`."""
    if name in _BY_SELECTOR and isinstance(value, Mapping):
        for selector in value:
            with blamed(index, step, name, str(selector)):
                modules_within(start(), selector)
    elif name == "select":
        with blamed(index, step, name):
            modules_within(start(), value)
    elif name == "path":
        with blamed(index, step, name):
            start()[value]


def _run_check(check: Callable[..., Any], index: int, step: PipelineStep, given: Mapping[str, Any]) -> None:
    """Call a check of a function with the options that it takes; of a mapping, the entry at fault is named."""
    taken = list(inspect.signature(check).parameters)
    if not set(taken) & set(given):
        return
    defaults = {key: each.default for key, each in step.kind.parameters.items()}
    arguments = {key: given.get(key, defaults.get(key)) for key in taken}
    option = next(key for key in taken if key in given)
    if isinstance(given[option], Mapping):
        for key, value in given[option].items():
            with blamed(index, step, option, str(key)):
                check(**{**arguments, option: {key: value}})
    with blamed(index, step, option):
        check(**arguments)


def _try_tool(step: PipelineStep) -> None:
    """Run a tool on a model of one node: is it installed, and has it these options?"""
    try:
        with quiet("htp_export"):
            step.kind.load()(_one_product(), **step.options)
    except InputError:
        raise
    except HtpExportError:  # about the model, which counts for nothing
        pass


def _one_product() -> ir.Model:
    x, weight = ir.val("x", ir.DataType.FLOAT, [2, 32]), ir.val("weight", const_value=ir.tensor(np.eye(32, dtype="f")))
    node = ir.node("MatMul", [x, weight], metadata_props=tags.node_tags(["layer"], "scope", {"", "layer"}))
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 20}, name="net")
    return ir.Model(graph, ir_version=10, metadata_props={tags.FORMAT: tags.VERSION})
