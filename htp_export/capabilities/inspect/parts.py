"""A PyTorch model that cannot be traced as a whole: its modules, each exported alone, and equal ones once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.inspect.merging import Piece, merged
from htp_export.capabilities.inspect.runs import ModuleRun
from htp_export.capabilities.inspect.stops import reason_of
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.module_paths import module_paths
from htp_export.format.parameters import parameters_of

if TYPE_CHECKING:
    import torch

__all__ = ["Parts", "call_signature"]

_Export = Callable[["torch.nn.Module", tuple[Any, ...], dict[str, Any]], ir.Model]


class Parts:
    """The modules of one model, those that were exported alone and those that failed.

    Modules that are alike, and are given alike tensors, are exported once.

    Args:
        model: The model.
        run: One run of it.
        failure: Why the model as a whole failed.
        export: Makes a graph of a module and its arguments.
    """

    def __init__(self, model: torch.nn.Module, run: ModuleRun, failure: str, export: _Export) -> None:
        self._model, self._run, self._export = model, run, export
        self._modules = {path: module for path, _, module in module_paths(model)}
        self._tree = Hierarchy.from_module(model)
        self._tree = self._tree.with_results(
            calls=run.counts, fates={path: Fate.of_calls(run.counts.get(path, 0)) for path in self._tree}
        )
        self._failures: dict[str, str] = {}
        self._done: dict[str, ir.Model] = {}  # of modules that were exported alone
        self._exports: dict[Hashable, ir.Model | str] = {}
        self._take("", failure)

    @property
    def exported(self) -> int:
        """How many modules were exported alone."""
        return len(self._done)

    @property
    def failures(self) -> Mapping[str, str]:
        """Module path → why it could not be exported: itself, or because of modules below it."""
        return {path: self._failure_text(path) for path in self._failures}

    def graph(self) -> ir.Model:
        """The whole tree, with the nodes of what was exported."""
        pieces = [Piece(part, path, path) for path, part in self._done.items()]
        return merged(pieces, self._tree, parameters_of(self._model))

    @property
    def innermost(self) -> list[str]:
        """The modules that failed, and none below them."""
        return [
            path
            for path in self._failures
            if not any(deeper != path and tags.is_under(deeper, path) for deeper in self._failures)
        ]

    def _take(self, path: str, failure: str) -> None:
        """Export the modules below one that failed; those that fail too, by their own."""
        self._failures[path] = failure
        for child in self._children(path):
            result = self._part(child)
            if isinstance(result, str):
                self._take(child, result)
            else:
                self._done[child] = result

    def _part(self, path: str) -> ir.Model | str:
        """A module exported alone, or why that failed; of modules that are alike, the first is exported."""
        module, (args, kwargs) = self._modules[path], self._run.given[path]
        alike = call_signature(module, args, kwargs)
        if alike not in self._exports:
            try:
                self._exports[alike] = self._export(module, args, kwargs)
            except Exception as error:  # whatever torch raises on what it cannot export
                self._exports[alike] = reason_of(error)
        return self._exports[alike]

    def _children(self, path: str) -> Iterator[str]:
        """The modules below that ran; containers are looked into."""
        for child in self._tree.children(path):
            if child in self._run.given:
                yield child
            else:
                yield from self._children(child)

    def _failure_text(self, path: str) -> str:
        culprits = [deeper for deeper in self.innermost if deeper != path and tags.is_under(deeper, path)]
        return f"because of {', '.join(culprits)}" if culprits else self._failures[path]


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def call_signature(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What a module computes when it is called so: equal for modules that are alike and are given alike tensors.

    Classes, modes, plain attributes, hooks, and shapes and types of weights and arguments count. Any other object is
    equal to itself alone: modules that share a configuration are alike, those with copies of it are not.

    Examples:
        >>> import torch
        >>> one, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> x, y = torch.ones(2, 4), torch.zeros(2, 4)
        >>> call_signature(one, (x,), {}) == call_signature(other, (y,), {})
        True
        >>> call_signature(one, (x,), {}) == call_signature(one, (torch.ones(5, 4),), {})
        False
    """
    seen: dict[int, int] = {}  # the same weight, or the same part, in two places
    parts = tuple((path, _module(part, seen)) for path, part in module.named_modules(remove_duplicate=False))
    return (parts, _value(args), _value(dict(kwargs)))


def _module(module: torch.nn.Module, seen: dict[int, int]) -> Hashable:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    tensors = [*module._parameters.items(), *module._buffers.items()]
    weights = tuple((name, _value(each), seen.setdefault(id(each), len(seen))) for name, each in tensors)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (type(module), seen.setdefault(id(module), len(seen)), _value(own), weights, tuple(map(id, hooks)))


def _value(value: Any) -> Hashable:
    import torch

    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape, value.dtype, value.device.type, value.requires_grad, type(value))
    if isinstance(value, Mapping):
        return (type(value), tuple((repr(name), _value(each)) for name, each in value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), tuple(map(_value, value)))
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    return (type(value), id(value))
