"""Calls of a transformers model for the files of a task: inputs, names, and dynamic dimensions."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir

from htp_export.capabilities.huggingface import caches
from htp_export.capabilities.huggingface.caches import windows_of_tokens
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.sources import Processor
from htp_export.capabilities.huggingface.tasks import (
    Axes,
    input_axes,
    output_axes,
    split_task,
    wanted_outputs,
)
from htp_export.errors import InputError, described
from htp_export.format.leaves import named_tensors_in, tensors_in
from htp_export.process.restoring import restored, set_item

if TYPE_CHECKING:
    import torch
    from torch import nn

CacheNames = Literal["optimum", "transformers"]
Adapt = Callable[[Callable[..., Any], dict[str, Any]], Any]

CACHE = "past_key_values."
_TOTAL = "past_sequence_length + sequence_length"
DECODER: dict[str, Axes] = {
    "attention_mask": {0: "batch_size", 1: _TOTAL},
    CACHE: {0: "batch_size", 2: "past_sequence_length"},
    f"present.{CACHE}": {0: "batch_size", 2: _TOTAL},
}
"""Dynamic dimensions of a decoder with a cache as input."""

_TOLERANCE = 0.02
"""Part of the largest logit by which equal logits may differ: more than kernels differ by in half precision."""


@dataclass(frozen=True)
class ExampleCall:
    """One call of a model, and the names of its inputs and outputs in a file.

    Attributes:
        task: The task, with ``-with-past`` if there is a cache.
        model: The module that is called.
        kwargs: Its arguments, in the order of ``forward``'s signature.
        dynamic_shapes: The dimensions of ``kwargs`` that may vary, for ``torch.export``.
        input_names: The names of the graph's inputs.
        output_names: The names of the graph's outputs.
        axes: Input or output → dimension → name of the dimension.
        runs: Name → arguments of the same call, for a check of each use of the file: ``prefill``
            with an empty cache, ``decode`` with tokens in it. A file with one use has one run.
        adapt: Calls the model's own ``forward`` for a file with fewer outputs, or other arguments;
            None for a file with the model's own. See ``adapted``.
        right_padding: Whether sliding windows count tokens, so that texts may be padded on the
            right; see `example_calls`.
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
            "custom_translation_table": caches.translations(),
        }

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Name in the file → tensor of ``kwargs``, also of a cache."""
        return dict(zip(self.input_names, tensors_in(self.kwargs), strict=True))

    @contextlib.contextmanager
    def adapted(self) -> Iterator[None]:
        """Inside the block, the model has the arguments and results of the file; verify it there.

        Its modules and their paths are unchanged.
        """
        windows = windows_of_tokens() if self.right_padding else contextlib.nullcontext()
        with adapted(self.model, self.adapt, self.kwargs), windows:
            yield

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Like `adapted`, with the patches of transformers' exporters for a trace; export the model inside."""
        with (
            self.adapted(),
            caches.tracing_as_transformers_does(self.model),
            _never_empty(self.model),
        ):
            yield

    def name_dimensions(self, graph: ir.Graph) -> None:
        """Name the open dimensions of an exported graph's inputs and outputs after ``axes``.

        torch orders the terms of a sum in its own way (``sequence_length + past_sequence_length``),
        and leaves dimensions of ``Dim.AUTO`` without a name.
        """
        for value in (*graph.inputs, *graph.outputs):
            names = self.axes.get(str(value.name), {})
            if value.shape is None or not names:
                continue
            sizes: list[int | str | ir.SymbolicDim] = []
            for dimension, size in enumerate(value.shape):
                is_open = isinstance(size, ir.SymbolicDim)
                sizes.append(names.get(dimension, size) if is_open else size)
            value.shape = ir.Shape(sizes)


@contextlib.contextmanager
def adapted(model: nn.Module, adapt: Adapt | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, ``model.forward`` has the parameters ``kwargs``, and calls ``adapt``; nothing without one."""
    if adapt is None:
        yield
        return
    original = model.forward

    def forward(**arguments: Any) -> Any:
        return adapt(original, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in kwargs]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it

    # An attribute of this object: other models of the class keep their forward.
    with restored(lambda changes: set_item(changes, vars(model), "forward", forward)):
        yield


@contextlib.contextmanager
def _never_empty(model: nn.Module) -> Iterator[None]:
    """Inside the block, tell torch.export that no argument except the cache is empty.

    A model may slice a tensor of size 1 by the number of tokens, as MPT does with its biases.
    Without this bound, the size of the slice is unknown, and torch.export assumes that it is the
    number of tokens.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import constrain_range

    def bound(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, torch.Tensor):
                continue
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    constrain_range(size, min=1)

    hook = functools.partial(model.register_forward_pre_hook, bound, with_kwargs=True)
    with restored(lambda changes: changes.will_undo(hook().remove)):
        yield


def run(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Call a model without gradients, and restore it; a cache among the arguments receives the tokens."""
    import torch

    from htp_export.exporter.capture.model_state import unchanged

    with unchanged(model, ()), torch.no_grad():
        return model(**kwargs)


def is_same(logits: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether logits of two computations are equal up to the rounding of kernels."""
    import torch

    return torch.allclose(logits, wanted, rtol=0, atol=_TOLERANCE * float(wanted.abs().max()))


@dataclass(frozen=True)
class Calls:
    """Creates the calls of the files of one model of transformers.

    Attributes:
        model: The model.
        task: The task.
        cache_names: The names of the tensors of a cache; see `example_calls`.
        sizes: Name of a dimension → its size in the example.
        seed: The seed of example inputs.
        processor: The tokenizer and the image processor, if there are any.
    """

    model: Any
    task: str
    cache_names: CacheNames
    sizes: Mapping[str, int]
    seed: int
    processor: Processor | None

    def refused(
        self, problem: str, advice: str = "; choose a task without -with-past"
    ) -> InputError:
        """The error for a model that has no such files."""
        return InputError(f"{type(self.model).__name__} {problem}{advice}")

    def without_a_cache(self) -> InputError:
        """The error for a model that does not return a filled cache."""
        problem = f"returns no {self.cache}: its config has use_cache=False, or it uses a cache of its own"
        return self.refused(problem, "")

    @property
    def cache(self) -> str:
        """The name of the cache among the arguments and the results of the model."""
        # Of the class: `adapted` replaces the forward of the object.
        return caches.cache_argument(type(self.model)) or ""

    def inputs(self, shapes: Mapping[str, Any] | None, batch: int = 1) -> dict[str, Any]:
        """Example inputs of the model; see `example_inputs`."""
        return example_inputs(
            self.model, shapes=shapes, batch=batch, seed=self.seed, processor=self.processor
        )

    def tokens(self, length: int) -> dict[str, Any]:
        """Tokens, their mask and their positions, as far as they are arguments of the model.

        One token of the last text is masked, but not the first one: a token that attends to no
        other token has no defined result, and kernels differ in it.
        """
        import torch

        ids = self.inputs({"input_ids": [self.sizes["batch_size"], length]})["input_ids"]
        mask = torch.ones_like(ids)
        mask[-1, 1:2] = 0
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
        return {name: tensors[name] for name in named_parameters(self.model) if name in tensors}

    def prefill_and_decode(
        self, whole: Mapping[str, Any], length: int
    ) -> dict[str, dict[str, Any]]:
        """Arguments for the first ``length`` tokens with an empty cache, and for the others with these in the cache.

        In ``whole``, the arguments for all tokens, the second dimension counts the tokens; in
        positions, the last.
        """

        def part(name: str, value: torch.Tensor, tokens: slice) -> torch.Tensor:
            return value[..., tokens] if name == "position_ids" else value[:, tokens]

        first: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, value in whole.items():
            first[name] = part(name, value, slice(length))
            # The mask covers the tokens in the cache, too.
            is_mask = name == "attention_mask"
            rest[name] = value if is_mask else part(name, value, slice(length, None))
        cache = caches.empty_cache(self.model)
        try:
            run(self.model, {**first, self.cache: cache})
        except Exception as error:  # from a model with a cache of its own
            raise self.refused(
                f"cannot be called with a {type(cache).__name__} ({described(error)})"
            ) from error
        prefill = {**first, self.cache: caches.emptied(cache)}
        decode = {**rest, self.cache: cache}
        order = named_parameters(self.model)
        return {
            "prefill": {name: prefill[name] for name in order if name in prefill},
            "decode": {name: decode[name] for name in order if name in decode},
        }

    def call(
        self,
        runs: Mapping[str, dict[str, Any]],
        *,
        model: nn.Module | None = None,
        adapt: Adapt | None = None,
        axes: Mapping[str, Axes] | None = None,
        example: dict[str, Any] | None = None,
        right_padding: bool = False,
    ) -> ExampleCall:
        """Create the call that a file is exported from, with the names of its inputs and outputs.

        Args:
            runs: Name → arguments; see `ExampleCall`.
            model: The module to call; by default, the whole model.
            adapt: As for `ExampleCall`.
            axes: Names of dimensions that differ from optimum's for the task. The keys
                ``past_key_values.`` and ``present.past_key_values.`` mean all tensors of a cache.
            example: The arguments of the exported call; by default, those of the last run.
            right_padding: As for `ExampleCall`.
        """
        kwargs = example or list(runs.values())[-1]
        model = model or self.model
        base = str(split_task(self.task)[0])
        with adapted(model, adapt, kwargs):
            returned = run(model, copy.deepcopy(kwargs))
        if adapt is None and isinstance(returned, Mapping):
            kept = self._kept_outputs(base, list(returned))
            if len(kept) < len(returned):
                adapt = functools.partial(_keeping, kept)
                returned = {name: returned[name] for name in kept}
        inputs, outputs = dict(named_tensors_in(kwargs)), dict(named_tensors_in(returned))
        if self._has_cache(inputs) and not self._has_cache(outputs):
            raise self.without_a_cache()
        input_dims = {
            path: self._axes_of(path, axes) or input_axes(base, path, tensor)
            for path, tensor in inputs.items()
        }
        output_dims = {
            path: self._axes_of(path, axes, "present.") or output_axes(base, path)
            for path in outputs
        }
        input_names, output_names = self._names(list(inputs), list(outputs))
        return ExampleCall(
            task=self.task,
            model=model,
            kwargs=kwargs,
            dynamic_shapes={
                name: _dynamic_shape(name, value, input_dims) for name, value in kwargs.items()
            },
            input_names=input_names,
            output_names=output_names,
            axes={
                **dict(zip(input_names, input_dims.values(), strict=True)),
                **dict(zip(output_names, output_dims.values(), strict=True)),
            },
            runs=runs,
            adapt=adapt,
            right_padding=right_padding,
        )

    def _kept_outputs(self, task: str, names: Sequence[str]) -> list[str]:
        """The results of the model that a file for a task has: the wanted ones, and the cache."""
        kept = wanted_outputs(task, [name for name in names if name != self.cache])
        if self.cache in names:
            kept.append(self.cache)
        return kept

    def _has_cache(self, paths: Iterable[str]) -> bool:
        """Whether a tensor of the cache is among arguments or results."""
        return any(path.startswith(f"{self.cache}.") for path in paths)

    def _axes_of(self, path: str, axes: Mapping[str, Axes] | None, side: str = "") -> Axes | None:
        """The entry of ``axes`` for a path, or the most specific one for tensors of a cache; None without one."""
        if axes is None:
            return None
        prefix = f"{self.cache}."
        if path.startswith(prefix):
            path = f"{side}{CACHE}{path.removeprefix(prefix)}"
        matches = [
            name for name in axes if path == name or (CACHE in name and path.startswith(name))
        ]
        return axes[max(matches, key=len)] if matches else None

    def _names(
        self, inputs: list[str], outputs: list[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the graph's inputs and outputs."""
        if self.cache_names == "optimum":
            input_names = tuple(caches.leaf_name(path, "past_key_values") for path in inputs)
            return input_names, tuple(caches.leaf_name(path, "present") for path in outputs)
        from transformers.exporters.utils import disambiguate_io_names

        inputs, outputs = disambiguate_io_names(inputs, outputs)
        return tuple(inputs), tuple(outputs)


def _keeping(names: list[str], forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a model, and return only the results with these names."""
    returned = forward(**arguments)
    return {name: returned[name] for name in names}


_DECIDED_BY_TORCH = {"height", "width", "num_channels", "num_images", "num_patches"}
"""Dimensions that may be constant: many models accept images of one size, and check it in a trace."""


def _dynamic_shape(name: str, value: Any, axes: Mapping[str, Axes]) -> Any:
    """The entry of ``dynamic_shapes`` for an argument: names of dimensions, or torch's own choice for images."""
    import torch

    if name in axes:
        shape: dict[int, Any] = dict(axes[name])
        for dimension, dimension_name in axes[name].items():
            if dimension_name in _DECIDED_BY_TORCH:
                shape[dimension] = torch.export.Dim.AUTO
        return shape
    if isinstance(value, torch.Tensor):
        return None
    paths = [path for path, _ in named_tensors_in({name: value})]
    return [axes[path] for path in paths] or None
