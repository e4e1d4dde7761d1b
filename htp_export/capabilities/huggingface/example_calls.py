"""Calls of a transformers model as its files need them: inputs, names, and what may vary, by task."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir

from htp_export.capabilities.huggingface.caches import leaf_name, tracing_as_transformers_does, translations
from htp_export.capabilities.huggingface.task_names import Axes, input_axes, output_axes, wanted_outputs
from htp_export.capabilities.huggingface.tasks import split_task
from htp_export.capabilities.huggingface.windows import windows_of_tokens
from htp_export.errors import InputError
from htp_export.format.leaves import named_tensors_in, tensors_in
from htp_export.process.restoring import Changes, restored

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Adapt", "CacheNames", "ExampleCall", "adapted", "example_of_runs", "run", "without_a_cache"]

CacheNames = Literal["optimum", "transformers"]
Adapt = Callable[[Callable[..., Any], dict[str, Any]], Any]

_CACHE = "past_key_values."


@dataclass(frozen=True)
class ExampleCall:
    """One call of a model, and how its inputs and outputs are called in a file.

    Attributes:
        task: The task, with ``-with-past`` if there is a cache.
        model: The module that is called.
        kwargs: Its arguments, in the order of ``forward``'s signature.
        dynamic_shapes: Which dimensions may vary, as ``torch.export`` wants it for ``kwargs``.
        input_names: The names of the graph's inputs.
        output_names: The names of the graph's outputs.
        axes: Input or output → dimension → the name of the dimension.
        runs: Name → arguments of the same call, for a check of the file in each way in which it is used: ``prefill``
            with an empty cache, ``decode`` with tokens in it. A file that is used in one way has one.
        adapt: Calls the model's own ``forward`` for a file with fewer outputs, or other arguments; None for a file
            with those of the model. See ``adapted``.
        right_padding: Whether sliding windows count tokens, so that texts may be padded on the right; see
            `example_calls`.
    """

    task: str
    model: nn.Module
    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]]
    runs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    adapt: Adapt | None = None
    right_padding: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``htp_export.export``, without the model and the file."""
        return {
            "kwargs": self.kwargs,
            "dynamic_shapes": self.dynamic_shapes,
            "input_names": list(self.input_names),
            "output_names": list(self.output_names),
            "custom_translation_table": translations(),
        }

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors of ``kwargs``, those of a cache too, under the names that the file has for them."""
        return dict(zip(self.input_names, tensors_in(self.kwargs), strict=True))

    @contextlib.contextmanager
    def adapted(self) -> Iterator[None]:
        """The model with the arguments and results of the file, as long as a ``with`` block runs; verify it inside.

        Its modules, and their paths, are its own.
        """
        windows = windows_of_tokens() if self.right_padding else contextlib.nullcontext()
        with adapted(self.model, self.adapt, self.kwargs), windows:
            yield

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """The same, and what transformers' exporters replace while a model is traced; export it inside."""
        with self.adapted(), tracing_as_transformers_does(self.model), _never_empty(self.model):
            yield

    def name_dimensions(self, graph: ir.Graph) -> None:
        """Give the dimensions of a graph's inputs and outputs the names of ``axes``; fixed sizes stay.

        torch composes the name of a sum in an order of its own (``sequence_length + past_sequence_length``), and names
        no dimension that it was left to decide about.

        Args:
            graph: What ``htp_export.export`` made of this call; changed in place.
        """
        for value in (*graph.inputs, *graph.outputs):
            dims = self.axes.get(str(value.name), {})
            if value.shape is not None and dims:
                value.shape = ir.Shape(
                    dims.get(place, size) if isinstance(size, ir.SymbolicDim) else size
                    for place, size in enumerate(value.shape)
                )


@contextlib.contextmanager
def adapted(model: nn.Module, adapt: Adapt | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Call a model's ``forward`` through a function, under the names of some arguments, as long as a block runs."""
    if adapt is None:
        yield
        return
    own, original = vars(model).get("forward"), model.forward

    def forward(**arguments: Any) -> Any:
        return adapt(original, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in kwargs]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it

    def put_back() -> None:
        vars(model).pop("forward", None)
        if own is not None:
            model.forward = own

    def make(changes: Changes) -> None:
        changes.will_undo(put_back)
        model.forward = forward  # of this object alone, until the block ends

    with restored(make):
        yield


@contextlib.contextmanager
def _never_empty(model: nn.Module) -> Iterator[None]:
    """Tell torch.export that no argument is empty but the cache, as long as a ``with`` block runs.

    A model may slice a tensor of size 1 by the number of tokens, as MPT does with its biases. Without this bound, the
    size of the slice is unknown, and torch.export takes it for the number of tokens.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import constrain_range

    def bound(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt):
                    constrain_range(size, min=1)

    with restored(lambda changes: changes.will_undo(model.register_forward_pre_hook(bound, with_kwargs=True).remove)):
        yield


def example_of_runs(
    task: str,
    model: nn.Module,
    runs: Mapping[str, dict[str, Any]],
    cache_names: CacheNames,
    *,
    adapt: Adapt | None = None,
    axes: Mapping[str, Axes] | None = None,
    example: dict[str, Any] | None = None,
) -> ExampleCall:
    """A call with the names of its inputs and of its outputs, as the model returns them.

    Args:
        task: The task.
        model: The module that is called.
        runs: As for `ExampleCall`.
        cache_names: Whose names the tensors of a cache have.
        adapt: As for `ExampleCall`.
        axes: Input or output → dimension → name, where it is not optimum's of the task.
        example: The arguments of the call that is exported; by default, those of the last run.

    Raises:
        InputError: If the model does not return the cache.
    """
    kwargs, axes = example or list(runs.values())[-1], axes or {}
    base = str(split_task(task)[0])
    inputs = dict(named_tensors_in(kwargs))
    with adapted(model, adapt, kwargs):
        returned = run(model, copy.deepcopy(kwargs))
    if adapt is None and isinstance(returned, Mapping):
        kept = wanted_outputs(base, {name: None for name in returned if name != "past_key_values"})
        kept += [name for name in returned if name == "past_key_values"]
        if len(kept) < len(returned):
            adapt = _keeping(kept)
            returned = {name: returned[name] for name in kept}
    outputs = dict(named_tensors_in(returned))
    has_cache = any(path.startswith(_CACHE) for path in inputs)
    if has_cache and not any(path.startswith(_CACHE) for path in outputs):
        raise without_a_cache(model)
    ins, outs = _names(inputs, outputs, cache_names)
    known = {path: _axes_of(path, axes) or input_axes(base, path, tensor) for path, tensor in inputs.items()}
    made = {path: _axes_of(f"present.{path}", axes) or axes.get(path) or output_axes(base, path) for path in outputs}
    named = {ins[path]: dims for path, dims in known.items()} | {outs[path]: dims for path, dims in made.items()}
    shapes = {name: _dynamic(name, value, known) for name, value in kwargs.items()}
    return ExampleCall(task, model, kwargs, shapes, tuple(ins.values()), tuple(outs.values()), named, runs, adapt)


def without_a_cache(model: nn.Module) -> InputError:
    """The error for a model that puts nothing into a cache."""
    problem = "its config has use_cache=False, or it uses a cache of its own"
    return InputError(f"{type(model).__name__} returns no past_key_values: {problem}")


def _keeping(names: list[str]) -> Adapt:
    """Let a model return these of its results alone."""

    def adapt(forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        returned = forward(**arguments)
        return {name: returned[name] for name in names}

    return adapt


def run(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Call a model without gradients."""
    import torch

    with torch.no_grad():
        return model(**kwargs)


def _axes_of(path: str, axes: Mapping[str, Axes]) -> Axes | None:
    """The axes that are given for a path, or for all tensors of a cache."""
    for prefix in (f"{_CACHE}cross", f"{_CACHE}", f"present.{_CACHE}cross", f"present.{_CACHE}"):
        if path.startswith(prefix) and prefix in axes:
            return axes[prefix]
    return axes.get(path)


def _dynamic(name: str, value: Any, axes: Mapping[str, Axes]) -> Any:
    """What ``torch.export`` is to be told of an argument: a name where a size varies, and its own choice for images.

    Many models take images of one size, and say so while they are traced.
    """
    import torch

    if name in axes:
        decided = {"height", "width", "num_channels", "num_images"}
        return {place: torch.export.Dim.AUTO if dim in decided else dim for place, dim in axes[name].items()}
    paths = [path for path, _ in named_tensors_in({name: value})]
    return [axes[path] for path in paths] if paths and not isinstance(value, torch.Tensor) else None


def _names(
    inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], cache_names: CacheNames
) -> tuple[dict[str, str], dict[str, str]]:
    """Path → name, of inputs and of outputs."""
    if cache_names == "optimum":
        ins = {path: leaf_name(path, "past_key_values") for path in inputs}
        return ins, {path: leaf_name(path, "present") for path in outputs}
    from transformers.exporters.utils import disambiguate_io_names

    named_in, named_out = disambiguate_io_names(list(inputs), list(outputs))
    return dict(zip(inputs, named_in, strict=True)), dict(zip(outputs, named_out, strict=True))
