"""Orders that PyTorch and ONNX leave open: those of equal elements, and of results that are said to be unsorted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.verify.file_run import FileRun
from htp_export.shapes.operator_kinds import is_standard

__all__ = ["stable_sorting", "with_sorted_results"]

_SORTED = "sorted"  # the attribute of TopK and Unique, and the argument of PyTorch's functions


@contextlib.contextmanager
def stable_sorting() -> Iterator[None]:
    """Let sorts be stable and ``sorted=False`` be sorted in a block, where PyTorch leaves the order open.

    A mixture of experts sorts tokens by expert. In which order those of one expert follow each other is open, and
    every module between the two sorts would differ. Its router takes the best experts of a token, unsorted as a rule;
    of equal ones, ``TopK`` takes those that come first.

    Examples:
        >>> import torch
        >>> with stable_sorting():
        ...     torch.sort(torch.zeros(1000))[1].tolist() == list(range(1000))
        True
    """
    import torch
    from torch.overrides import TorchFunctionMode

    sorting = {torch.sort, torch.Tensor.sort, torch.argsort, torch.Tensor.argsort}
    best = {torch.topk, torch.Tensor.topk}

    def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, places = torch.sort(input, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))

    class Stable(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if function in best and "out" not in given and (args or list(given.values()))[0].ndim:
                return topk(*args, **given)
            if given.get(_SORTED) is False:
                given[_SORTED] = True
            named = any(isinstance(each, str) for each in args[1:]) or "dimname" in given
            if function in sorting and "stable" not in given and not named and len(args) <= 3:
                # With `stable`, the others are keywords alone.
                given |= dict(zip(("dim", "descending"), args[1:], strict=False))
                return function(args[0], stable=True, **given) if args else function(stable=True, **given)
            return function(*args, **given)

    with Stable():
        yield


def with_sorted_results(run: FileRun) -> FileRun:
    """Sort the results of the nodes of a file whose attribute ``sorted`` is 0, which leaves their order open.

    Returns:
        A copy; the file itself if it has no such nodes.
    """

    def unsorted(model: ir.Model) -> Iterator[ir.Node]:
        return (node for node in model.graph.all_nodes() if is_standard(node) and _is_unsorted(node))

    if not any(unsorted(run.tagged.model)):
        return run
    run = replace(run, tagged=run.tagged.clone())
    for node in unsorted(run.tagged.model):
        node.attributes[_SORTED] = ir.AttrInt64(_SORTED, 1)
    return run


def _is_unsorted(node: ir.Node) -> bool:
    attribute = node.attributes.get(_SORTED)
    return attribute is not None and not attribute.is_ref() and attribute.value == 0
