"""A PyTorch model that cannot be traced as a whole: its modules, each exported alone with what one run gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.inspect.inspected import Inspected, Stop
from htp_export.capabilities.inspect.merging import Piece, merged
from htp_export.capabilities.inspect.runs import run_once
from htp_export.capabilities.inspect.stops import reason_of
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.module_paths import module_paths
from htp_export.format.parameters import parameters_of

if TYPE_CHECKING:
    import torch

__all__ = ["by_parts"]

_Export = Callable[["torch.nn.Module", tuple[Any, ...], dict[str, Any]], ir.Model]


def by_parts(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stopped: Sequence[Stop], export: _Export
) -> Inspected:
    """The largest modules that can be exported alone, side by side; a RuntimeError if there is none.

    ``stopped`` says first why the model as a whole could not be exported.
    """
    run = run_once(model, args, kwargs)
    modules = {path: module for path, _, module in module_paths(model)}
    tree = Hierarchy.from_module(model)
    fates = {path: Fate.of_calls(run.counts.get(path, 0)) for path in tree}
    tree = tree.with_results(calls=run.counts, fates=fates)
    failures = {"": stopped[0].reason if run.error is None else reason_of(run.error)}
    exported: dict[str, ir.Model] = {}

    def called_in(path: str) -> Iterator[str]:
        """The modules below that ran; containers are looked into."""
        for child in tree.children(path):
            yield from [child] if child in run.given else called_in(child)

    pending = [*called_in("")]
    while pending:
        path = pending.pop(0)
        try:
            exported[path] = export(modules[path], *run.given[path])
        except Exception as error:  # whatever torch raises on what it cannot export
            failures[path] = reason_of(error)
            pending = [*called_in(path), *pending]
    if not exported:
        raise RuntimeError("no module of the model can be exported alone")
    pieces = [Piece(part, path, path) for path, part in exported.items()]
    causes = {path: [other for other in _innermost(failures) if _is_inside(other, path)] for path in failures}
    note = (
        f"This model does not export as a whole. {len(exported)} of its modules were exported alone, "
        f"and {len(_innermost(failures))} could not be: see those whose fate is failed."
    )
    said = {path: f"because of {', '.join(causes[path])}" if causes[path] else why for path, why in failures.items()}
    return Inspected(merged(pieces, tree, parameters_of(model)), "parts", failures=said, notes=(note,))


def _innermost(failures: Mapping[str, str]) -> list[str]:
    """The modules that failed, and none below them."""
    return [path for path in failures if not any(_is_inside(deeper, path) for deeper in failures)]


def _is_inside(path: str, other: str) -> bool:
    return path != other and tags.is_under(path, other)
