"""Run a tool on the file of a tagged model, and restore the tags of its result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from htp_export.alignment.origin_map import tagged_model
from htp_export.capabilities.carry.carrying import Carried, carry_in_place
from htp_export.editing.flattening import read_flat
from htp_export.errors import HtpExportError, InputError, ResultError, ToolError, in_one_line
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import read_model, write_for_tool, write_model
from htp_export.files.parsing import model_from_proto
from htp_export.files.targets import check_target
from htp_export.files.written_check import made_from
from htp_export.model.hashes import same_numbers
from htp_export.model.tagged import ModelSource, model_of, name_of
from htp_export.model.tensor_names import make_node_names_unique
from htp_export.process.argument_types import checks_arguments
from htp_export.runtime.inputs import default_shapes

P = ParamSpec("P")

_TEMPORARY = "htp_export/"
"""Prefix of the names that nodes have while a tool runs."""


class Adapter(Protocol[P]):
    """The result of `adapter` for a function that runs a tool."""

    def __call__(
        self,
        model: ModelSource,
        output: str | os.PathLike[str] | None = None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Carried:
        """Run the tool on a tagged model, and restore the tags."""


def adapter(tool: Callable[Concatenate[Path, Path, P], Any]) -> Adapter[P]:
    """Create an adapter from a function that runs a tool.

    Args:
        tool: Accepts the file of a model, a target, and the options of the tool. It checks the
            options, imports the library, and returns the result or writes it to the target. Its
            docstring has the options; the arguments of all adapters are added.
    """
    options = list(inspect.signature(tool).parameters.values())[2:]

    def run(
        model: ModelSource, output: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any
    ) -> Carried:
        inspect.Signature(options).bind(*args, **kwargs)
        return _run(
            tool.__name__,
            lambda source, target: tool(source, target, *args, **kwargs),
            model,
            output,
        )

    common = list(inspect.signature(run).parameters.values())[:2]
    functools.update_wrapper(run, tool, assigned=("__module__", "__name__", "__qualname__"))
    del run.__wrapped__  # type: ignore[attr-defined] # readers of signatures would go on to it
    run.__signature__ = inspect.Signature([*common, *options], return_annotation="Carried")  # type: ignore[attr-defined]
    run.__doc__ = _docstring(inspect.getdoc(tool) or "")
    return checks_arguments(run)


def _docstring(text: str) -> str:
    """The docstring of an adapter, from that of its tool."""
    text, _, examples = text.partition("\nExamples:\n")
    summary, _, options = text.partition("\nArgs:\n")
    arguments = f"{_ARGS}\n{options}".rstrip()
    example = f"{_EXAMPLE_MODEL}\n{examples}" if examples else ""
    return "\n\n".join(filter(None, (summary.rstrip(), arguments, _RESULT, example)))


_ARGS = """Args:
    model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
    output: The file to write; None to only return the model."""
_RESULT = """Returns:
    The new model with tags, and the evidence for them.

Raises:
    InputError: The library is not installed, or rejects the model or an option.
    UntaggedModelError: The model has no tags.
    FileError: A file cannot be read or written.
    ToolError: The tool fails, or says that its result is not equal to the model."""
_EXAMPLE_MODEL = """Examples:
    >>> import torch, htp_export
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)"""


def _run(
    name: str,
    tool: Callable[[Path, Path], Any],
    model: ModelSource,
    output: str | os.PathLike[str] | None,
) -> Carried:
    """Run a tool on a tagged model and carry the tags to its result.

    While the tool runs, nodes without a unique name have a temporary one, and weights have no
    metadata: torch's repeats their shapes, which tools do not update when they transpose a weight.
    """
    check_target(output)
    before = read_flat(tagged_model(model), others=False).model  # tools rename what they inline
    names, metadata = _name_nodes(before), _take_metadata(before)
    with temporary_folder() as folder:
        source, target = folder / "model.onnx", folder / "made.onnx"
        write_for_tool(before, source)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                after = tool(source, target)
        except HtpExportError:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                raise InputError(f"{name}: {error}") from error
            message = _plain(error, {source: name_of(model, "the model"), target: "its result"})
            raise ToolError(
                name, f"failed on this model: {type(error).__name__}: {message}"
            ) from error
        after = _result_of(name, after, target)
        _check_open_inputs(name, before.graph, after.graph)
        result = carry_in_place(before, after)
        for node in result.model.graph.all_nodes():
            # some tools do not import the domains of their operators
            result.model.graph.opset_imports.setdefault(node.domain, 1)
            if node.name in names:
                node.name = names[node.name]
        for weight, value in result.model.graph.initializers.items():
            value.metadata_props.update(metadata.get(weight, {}))
        if output is not None:
            try:
                with made_from(lambda: [before]):
                    write_model(result.model, output)
            except ResultError as error:
                raise ToolError(
                    name, f"made a model of this one that is not valid: {error.problem}"
                ) from error
        _into_memory(result.model, Path(folder))
    return result


def _result_of(name: str, after: Any, target: Path) -> ir.Model:
    """The result of a tool, returned or written to the target, with unique names."""
    try:
        model = read_model(target) if after is None else after
        model = model_from_proto(model) if isinstance(model, onnx.ModelProto) else model
        # ONNX Runtime uses the same names for new nodes in a branch and outside
        make_node_names_unique(model.graph)
        NameFixPass()(model)
    except Exception as error:
        message = _plain(error, {target: "its result"})
        raise ToolError(name, f"made a model of this one that is not valid: {message}") from error
    return model


def _check_open_inputs(name: str, before: ir.Graph, after: ir.Graph) -> None:
    """Refuse a result without an optional input whose default is empty, such as one of `lora`."""
    left = {value.name for value in after.inputs}
    read = {value.name for value in before.inputs if value.uses()}
    for optional, shape in default_shapes(before).items():
        if 0 in shape and optional in read and optional not in left:
            message = f"made a model of this one that does not take input {optional!r} any more"
            raise ToolError(
                name, f"{message}: it took the default value, without elements, for a constant"
            )


def share_unchanged(model: ir.Model, source: ModelSource) -> None:
    """Store unchanged weights of a tool's result in the data file of the original model."""
    before = model_of(source).graph.initializers
    for name, value in model.graph.initializers.items():
        tensor, original = value.const_value, before[name].const_value if name in before else None
        if tensor is None or not isinstance(original, ir.ExternalTensor):
            continue
        if tensor.dtype == original.dtype and same_numbers(tensor, original):
            value.const_value = original


def _plain(error: BaseException, names: Mapping[Path, str]) -> str:
    """An error in one line, with the user's file names instead of temporary ones."""
    text = in_one_line(error)
    for file, name in names.items():
        text = text.replace(os.fspath(file), name)
    return text


def _name_nodes(model: ir.Model) -> dict[str, str | None]:
    """Give every node without a unique name a temporary one; return new name → old name."""
    nodes = list(model.graph.all_nodes())
    uses, names = Counter(node.name for node in nodes), dict[str, str | None]()
    for index, node in enumerate(nodes):
        if not node.name or uses[node.name] > 1:
            names[f"{_TEMPORARY}{index}"] = node.name
            node.name = f"{_TEMPORARY}{index}"
    return names


def _take_metadata(model: ir.Model) -> dict[str, dict[str, str]]:
    """Remove the metadata of all weights; return weight → its metadata."""
    metadata = dict[str, dict[str, str]]()
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            metadata[name] = dict(value.metadata_props)
            value.metadata_props.clear()
    return metadata


def _into_memory(model: ir.Model, folder: Path) -> None:
    """Load the weights from a temporary folder, which will be removed."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            if Path(tensor.base_dir).resolve() == folder.resolve():
                array = tensor.numpy().copy()
                value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)
