"""A PyTorch model that cannot be traced as a whole: its modules, each exported alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.inspect.equal_modules import call_signature
from htp_export.capabilities.inspect.merging import Piece, merged
from htp_export.capabilities.inspect.runs import ModuleRun
from htp_export.capabilities.inspect.stops import reason_of
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.module_paths import module_paths
from htp_export.format.parameters import parameters_of

if TYPE_CHECKING:
    import torch

__all__ = ["Parts"]

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
            calls=run.counts, fates={path: "computed" if path in run.counts else "uncalled" for path in self._tree}
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
