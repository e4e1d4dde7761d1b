"""Calls of a transformers model as its files need them: inputs, names, and what may vary, by task."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
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
"""Dimensions of a decoder that takes a cache."""

_DIFFERENT = 0.02  # of the largest logit: more than kernels differ by in half precision


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
        runs: Name → arguments of the same call, for a check of the file in each way in which it is
            used: ``prefill`` with an empty cache, ``decode`` with tokens in it. A file that is used
            in one way has one.
        adapt: Calls the model's own ``forward`` for a file with fewer outputs, or other arguments;
            None for a file with those of the model. See ``adapted``.
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
        with (
            self.adapted(),
            caches.tracing_as_transformers_does(self.model),
            _never_empty(self.model),
        ):
            yield

    def name_dimensions(self, graph: ir.Graph) -> None:
        """Give the dimensions of an exported graph's inputs and outputs the names of ``axes``; fixed sizes stay.

        torch composes the name of a sum in an order of its own (``sequence_length +
        past_sequence_length``), and names no dimension that it was left to decide about.
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
    original = model.forward

    def forward(**arguments: Any) -> Any:
        return adapt(original, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in kwargs]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it

    # of this object alone
    with restored(lambda changes: set_item(changes, vars(model), "forward", forward)):
        yield


@contextlib.contextmanager
def _never_empty(model: nn.Module) -> Iterator[None]:
    """Tell torch.export that no argument is empty but the cache, as long as a ``with`` block runs.

    A model may slice a tensor of size 1 by the number of tokens, as MPT does with its biases.
    Without this bound, the size of the slice is unknown, and torch.export takes it for the number
    of tokens.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import constrain_range

    def bound(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt):
                    constrain_range(size, min=1)

    with restored(
        lambda changes: changes.will_undo(
            model.register_forward_pre_hook(bound, with_kwargs=True).remove
        )
    ):
        yield


def run(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Call a model without gradients, and restore it; a cache among the arguments is filled."""
    import torch

    from htp_export.exporter.capture.model_state import unchanged

    with unchanged(model, ()), torch.no_grad():
        return model(**kwargs)


def is_same(logits: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether logits that were computed in two ways are the same, but for the rounding of kernels."""
    import torch

    return torch.allclose(logits, wanted, rtol=0, atol=_DIFFERENT * float(wanted.abs().max()))


@dataclass(frozen=True)
class Calls:
    """Makes the calls of the files of one model of transformers.

    The sizes are those of dimensions in the example, by name; the seed is that of the example
    inputs.
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
        """The error for a model that puts nothing into a cache."""
        problem = f"returns no {self.cache}: its config has use_cache=False, or it uses a cache of its own"
        return self.refused(problem, "")

    @property
    def cache(self) -> str:
        """The argument of the model that is a cache, and the name of the one that it returns."""
        return caches.cache_argument(type(self.model)) or ""  # whatever `adapted` calls

    def inputs(self, shapes: Mapping[str, Any] | None, batch: int = 1) -> dict[str, Any]:
        """Example inputs of the model; see `example_inputs`."""
        return example_inputs(
            self.model, shapes=shapes, batch=batch, seed=self.seed, processor=self.processor
        )

    def tokens(self, length: int) -> dict[str, Any]:
        """Tokens, their mask and their positions, as far as the model takes them.

        One token of the last text is masked. It is not the first: a token that may look at no token
        at all has no defined result, and kernels differ in it.
        """
        import torch

        ids = self.inputs({"input_ids": [self.sizes["batch_size"], length]})["input_ids"]
        mask = torch.ones_like(ids)
        mask[-1, 1:2] = 0
        made = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
        return {name: made[name] for name in named_parameters(self.model) if name in made}

    def prefill_and_decode(
        self, whole: Mapping[str, Any], length: int
    ) -> dict[str, dict[str, Any]]:
        """Arguments with an empty cache, and arguments with a cache in which the first tokens are.

        In the arguments for all tokens, the second dimension is that of the tokens; of positions,
        it is the last.
        """

        def part(name: str, value: torch.Tensor, tokens: slice) -> torch.Tensor:
            return value[..., tokens] if name == "position_ids" else value[:, tokens]

        first = {name: part(name, value, slice(length)) for name, value in whole.items()}
        rest = {
            name: value if name == "attention_mask" else part(name, value, slice(length, None))
            for name, value in whole.items()
        }
        cache = caches.empty_cache(self.model)
        try:
            run(self.model, {**first, self.cache: cache})
        except Exception as error:  # whatever a model raises that has a cache of its own
            raise self.refused(
                f"cannot be called with a {type(cache).__name__} ({described(error)})"
            ) from error
        runs = {
            "prefill": {**first, self.cache: caches.emptied(cache)},
            "decode": {**rest, self.cache: cache},
        }
        order = named_parameters(self.model)
        return {
            name: {key: given[key] for key in order if key in given} for name, given in runs.items()
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
        """The call that a file is exported from, with the names of its inputs and of its outputs; see `ExampleCall`.

        ``model`` is the module that is called, if it is not the whole model. ``axes`` are names of
        dimensions that are not optimum's of the task; ``past_key_values.`` and
        ``present.past_key_values.`` are all tensors of a cache. ``example`` are the arguments of
        the call that is exported; by default, those of the last run.
        """
        kwargs, model, base = (
            example or list(runs.values())[-1],
            model or self.model,
            str(split_task(self.task)[0]),
        )
        with adapted(model, adapt, kwargs):
            returned = run(model, copy.deepcopy(kwargs))
        if adapt is None and isinstance(returned, Mapping):
            kept = wanted_outputs(base, [name for name in returned if name != self.cache])
            kept += [name for name in returned if name == self.cache]
            if len(kept) < len(returned):
                adapt = functools.partial(_keeping, kept)
                returned = {name: returned[name] for name in kept}
        inputs, outputs = dict(named_tensors_in(kwargs)), dict(named_tensors_in(returned))
        own = f"{self.cache}."
        if any(path.startswith(own) for path in inputs) and not any(
            path.startswith(own) for path in outputs
        ):
            raise self.without_a_cache()
        taken = {
            path: self._axes_of(path, axes) or input_axes(base, path, tensor)
            for path, tensor in inputs.items()
        }
        made = {
            path: self._axes_of(path, axes, "present.") or output_axes(base, path)
            for path in outputs
        }
        ins, outs = self._names(list(inputs), list(outputs))
        named = dict(zip((*ins, *outs), (*taken.values(), *made.values()), strict=True))
        shapes = {name: _dynamic(name, value, taken) for name, value in kwargs.items()}
        return ExampleCall(
            self.task, model, kwargs, shapes, ins, outs, named, runs, adapt, right_padding
        )

    def _axes_of(self, path: str, axes: Mapping[str, Axes] | None, side: str = "") -> Axes | None:
        """The axes that are given for a path, or for all tensors of a cache, or of one side of it."""
        if path.startswith(f"{self.cache}."):
            path = f"{side}{CACHE}{path.removeprefix(f'{self.cache}.')}"
        fitting = [
            name for name in axes or {} if path == name or (CACHE in name and path.startswith(name))
        ]
        return (axes or {})[max(fitting, key=len)] if fitting else None

    def _names(
        self, inputs: list[str], outputs: list[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self.cache_names == "optimum":
            ins = tuple(caches.leaf_name(path, "past_key_values") for path in inputs)
            return ins, tuple(caches.leaf_name(path, "present") for path in outputs)
        from transformers.exporters.utils import disambiguate_io_names

        named_in, named_out = disambiguate_io_names(inputs, outputs)
        return tuple(named_in), tuple(named_out)


def _keeping(names: list[str], forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Let a model return these of its results alone."""
    returned = forward(**arguments)
    return {name: returned[name] for name in names}


def _dynamic(name: str, value: Any, axes: Mapping[str, Axes]) -> Any:
    """What ``torch.export`` is to be told of an argument: a name where a size varies, and its own choice for images.

    Many models take images of one size, and say so while they are traced.
    """
    import torch

    if name in axes:
        decided = {"height", "width", "num_channels", "num_images", "num_patches"}
        return {
            place: torch.export.Dim.AUTO if dim in decided else dim
            for place, dim in axes[name].items()
        }
    paths = [path for path, _ in named_tensors_in({name: value})]
    return [axes[path] for path in paths] if paths and not isinstance(value, torch.Tensor) else None
