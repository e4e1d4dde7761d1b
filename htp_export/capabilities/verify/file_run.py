"""A file with the inputs on which it runs: its tensors, their precision, and the branches that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx_ir as ir

from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.errors import InputError, UntaggedModelError
from htp_export.model.boundaries import dependence, reads_and_results
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array, ArrayStore, StoredArray
from htp_export.runtime.runner import Runner, portions
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import is_standard


@dataclass(frozen=True)
class FileRun:
    """A file, its name in errors, and how its tensors are computed from its inputs, ``feed``.

    ``portion_bytes`` of tensors are fetched in one run. With ``use_up``, the model may be changed
    instead of copied, because nothing else needs it.
    """

    tagged: TaggedModel
    name: str
    feed: Mapping[str, Array]
    settings: SessionSettings
    portion_bytes: int
    use_up: bool = False

    @cached_property
    def _runner(self) -> Runner:
        return Runner(self.tagged.model, self.name, self.settings, use_up=self.use_up)

    def fetch(self, sizes: Mapping[str, int], use: Callable[[str, Array], None]) -> None:
        """Call a function with each of some tensors once: name → its size in bytes, 0 if it is unknown.

        Their memory is released portion by portion.
        """
        computed = {}
        for name, size in sizes.items():
            value = self.tagged.values[name]
            if name in self.feed and value.producer() is None:
                use(name, self.feed[name])
            elif value.is_initializer() and value.const_value is not None:
                use(name, _weight(value, value.const_value))
            else:
                computed[name] = size
        for names in counted(
            list(portions(computed, self.portion_bytes)), "portions of the tensors"
        ):
            arrays = self._runner.run(self.feed, names)
            for name in names:
                use(name, arrays.pop(name))

    def stored(self, sizes: Mapping[str, int], store: ArrayStore) -> dict[str, StoredArray]:
        """Tensor name → its values, which `fetch` gives; they are kept in a store."""
        arrays: dict[str, StoredArray] = {}
        self.fetch(sizes, lambda name, array: arrays.update({name: store.keep(array)}))
        return arrays


def _weight(value: ir.Value, tensor: ir.TensorProtocol) -> Array:
    try:
        return tensor.numpy()
    except (OSError, ValueError) as error:
        raise InputError(f"weight {value.name!r} cannot be read: {error}") from error


def check_has_modules(tagged: TaggedModel, name: str) -> None:
    """Refuse a file that does not say which tensors belong to which module: it has neither tags nor signatures."""
    if tagged.source == "none" and not tagged.signatures:
        raise UntaggedModelError(
            f"{name}: has no module tags; a tool took them off, or it was not exported with htp_export.export(...)"
        )


# --- orders and branches that a run leaves open ---


def with_sorted_results(run: FileRun) -> FileRun:
    """A copy in which nodes sort their results where ``sorted=0`` leaves the order open; itself if it has no such."""

    def unsorted(model: ir.Model) -> Iterator[ir.Node]:
        return (
            node for node in model.graph.all_nodes() if is_standard(node) and _is_unsorted(node)
        )

    if not any(unsorted(run.tagged.model)):
        return run
    run = replace(run, tagged=run.tagged.clone())
    for node in unsorted(run.tagged.model):
        node.attributes["sorted"] = ir.AttrInt64("sorted", 1)
    return run


def _is_unsorted(node: ir.Node) -> bool:
    attribute = node.attributes.get("sorted")
    return attribute is not None and not attribute.is_ref() and attribute.value == 0


def with_taken_branches(run: FileRun) -> FileRun:
    """A copy with the nodes of the taken branch in place of each ``If``; the file itself if its main graph has none.

    The file runs once for each level of ``If`` inside ``If``. Branches in loop bodies stay as they
    are.
    """
    current, not_inlined = run, set[str | None]()
    while True:
        model = current.tagged.model
        branching = [
            node for node in model.graph if is_standard(node, "If") and node.name not in not_inlined
        ]
        if not branching:
            return current
        if current is run:
            current = replace(run, tagged=run.tagged.clone())
            continue
        conditions: dict[str, Array] = {}
        current.fetch({_condition(node): 0 for node in branching}, conditions.__setitem__)
        for node in branching:
            if not _inline(
                model, node, "then_branch" if conditions[_condition(node)].all() else "else_branch"
            ):
                not_inlined.add(node.name)
        current = replace(
            current, tagged=TaggedModel(model, run.tagged.hierarchy, run.tagged.source)
        )


def _condition(node: ir.Node) -> str:
    return str(node.inputs[0].name)  # type: ignore[union-attr] # an `If` has one


def _inline(model: ir.Model, node: ir.Node, branch: str) -> bool:
    """Inline a branch, whose results get the names of the outputs of the ``If``; return whether that is possible."""
    from htp_export.capabilities.optimize.passes.inline_branches import inline_branch

    graph = node.attributes[branch].as_graph()
    results = {
        value: old
        for old, value in zip(node.outputs, graph.outputs, strict=True)
        if value.graph is graph
    }
    names = {value: old.name for value, old in results.items()}
    if not inline_branch(model, model.graph, node, branch):
        return False
    for value, name in names.items():
        results[value].name, value.name = None, name
    return True


def numbered_as_in_file(
    tagged: TaggedModel, taken: TaggedModel, calls: Sequence[ModuleCall]
) -> tuple[list[ModuleCall], Mapping[str, int]]:
    """Renumber PyTorch's calls as in a file, which counts the calls of a module in all branches.

    ``taken`` is the file `with_taken_branches`. Also returned is, for each module with nodes in
    branches, the number of its calls outside or in taken branches. If this differs from the number
    of calls in PyTorch, its calls are not renumbered.
    """
    main = tagged.model.graph
    inside = dict.fromkeys(
        path
        for node in tagged.nodes
        if node.graph is not main
        for path in tagged.work_of(node).modules
        if path
    )
    if taken is tagged or not inside:
        return list(calls), {}
    numbers_of = {path: _calls_with_nodes(taken, path) for path in inside if path in taken}
    ran = Counter(call.path for call in calls)
    numbers = {path: known for path, known in numbers_of.items() if len(known) == ran[path]}
    renumbered = [
        replace(call, number=numbers[call.path][call.number]) if call.path in numbers else call
        for call in calls
    ]
    return renumbered, {path: len(known) for path, known in numbers_of.items()}


def _calls_with_nodes(tagged: TaggedModel, path: str) -> list[int]:
    region = tagged[path]
    if region.calls <= 1:
        return [0] if region.nodes else []
    return [number for number in range(region.calls) if region.call(number).nodes]


# --- precision ---

_BITS = {ir.DataType.FLOAT16: 1, ir.DataType.BFLOAT16: 2}
# the coarser one, where it is computed from both
_NAMES = {1: "float16", 2: "bfloat16", 3: "bfloat16"}


def half_precisions(tagged: TaggedModel) -> Mapping[str, str]:
    """Tensor of the main graph → the coarsest type of half precision among it and the tensors it is computed from.

    A tensor that is cast to float32 is as exact as what it was cast from.
    """
    if not _has_halves(tagged):
        return {}
    starts: dict[ir.Value | None, int] = {}
    for name, value in tagged.typed.items():
        if value.dtype in _BITS:
            starts[tagged.values[name]] = _BITS[value.dtype]
    found = dependence(reads_and_results(tagged.model.graph.all_nodes()), starts)
    return {name: _NAMES[found[value]] for name, value in tagged.values.items() if value in found}


def _has_halves(tagged: TaggedModel) -> bool:
    """Whether a tensor has such a type, as far as the file says so: then types are inferred."""
    casts = (node.attributes.get_int("to", 0) for node in tagged.nodes if is_standard(node, "Cast"))
    return any(value.dtype in _BITS for value in tagged.values.values()) or any(
        to in list(_BITS) for to in casts
    )
