"""Moves the branches that one run takes into the main graph, where their tensors can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.pytorch_calls import ModuleCall
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard

__all__ = ["numbered_as_in_file", "with_taken_branches"]


def with_taken_branches(run: FileRun) -> FileRun:
    """Replace each ``If`` of a file by the nodes of the branch that its inputs take.

    The file runs once for each level of ``If`` inside ``If``. Branches in loop bodies stay as they are.

    Returns:
        A copy; the file itself if no ``If`` stands in its main graph.

    Raises:
        InputError: If ONNX Runtime cannot run the file.
    """
    current, not_inlined = run, set[str | None]()
    while True:
        model = current.tagged.model
        branching = [node for node in model.graph if is_standard(node, "If") and node.name not in not_inlined]
        if not branching:
            return current
        if current is run:
            current = replace(run, tagged=run.tagged.clone())
            continue
        conditions: dict[str, bool] = {}

        def keep(condition: str, array: Array, conditions: dict[str, bool] = conditions) -> None:
            conditions[condition] = bool(array.all())

        current.fetch({str(node.inputs[0].name): 0 for node in branching if node.inputs[0] is not None}, keep)
        for node in branching:
            is_taken = node.inputs[0] is not None and conditions[str(node.inputs[0].name)]
            if not _inline(model, node, "then_branch" if is_taken else "else_branch"):
                not_inlined.add(node.name)
        current = replace(current, tagged=TaggedModel(model, run.tagged.hierarchy, run.tagged.source))


def _inline(model: ir.Model, node: ir.Node, branch: str) -> bool:
    """Inline a branch, whose results get the names of the outputs of the ``If``; return whether that is possible."""
    from htp_export.capabilities.optimize.passes.inline_branches import inline_branch

    graph = node.attributes[branch].as_graph()
    results = {value: old for old, value in zip(node.outputs, graph.outputs, strict=True) if value.graph is graph}
    names = {value: old.name for value, old in results.items()}
    if not inline_branch(model, model.graph, node, branch):
        return False
    for value, name in names.items():
        results[value].name, value.name = None, name
    return True


def numbered_as_in_file(
    tagged: TaggedModel, taken: TaggedModel, calls: Sequence[ModuleCall]
) -> tuple[list[ModuleCall], Mapping[str, int]]:
    """Renumber calls as in a file, which counts the calls of a module in all branches.

    Args:
        tagged: The file.
        taken: The file with `with_taken_branches`.
        calls: The calls in PyTorch.

    Returns:
        The calls, and for each module with nodes in branches the number of its calls outside or in taken branches. If
        this differs from the number of calls in PyTorch, its calls are not renumbered.
    """
    main = tagged.model.graph
    inside = dict.fromkeys(
        path for node in tagged.nodes if node.graph is not main for path in tagged.work_of(node).modules if path
    )
    if taken is tagged or not inside:
        return list(calls), {}
    numbers_of = {path: _calls_with_nodes(taken, path) for path in inside if path in taken}
    ran = Counter(call.path for call in calls)
    numbers = {path: known for path, known in numbers_of.items() if len(known) == ran[path]}
    renumbered = [
        replace(call, number=numbers[call.path][call.number]) if call.path in numbers else call for call in calls
    ]
    return renumbered, {path: len(known) for path, known in numbers_of.items()}


def _calls_with_nodes(tagged: TaggedModel, path: str) -> list[int]:
    region = tagged[path]
    if region.calls <= 1:
        return [0] if region.nodes else []
    return [number for number in range(region.calls) if region.call(number).nodes]
