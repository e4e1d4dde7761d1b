"""A file with the inputs of one run: its tensors, their precision, and the branches that it takes."""

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
from htp_export.runtime.settings import RunSettings
from htp_export.shapes.operator_kinds import is_standard


@dataclass(frozen=True)
class FileRun:
    """A file and the inputs and settings of its run.

    Attributes:
        tagged: The file.
        name: Its name in errors.
        feed: Input → values.
        settings: Settings of ONNX Runtime's session.
        portion_bytes: Bytes of tensors that are fetched in one run.
        use_up: Whether the model may be changed instead of copied, because nothing else needs it.
    """

    tagged: TaggedModel
    name: str
    feed: Mapping[str, Array]
    settings: RunSettings
    portion_bytes: int
    use_up: bool = False

    @cached_property
    def _runner(self) -> Runner:
        return Runner(self.tagged.model, self.name, self.settings, use_up=self.use_up)

    def fetch(self, sizes: Mapping[str, int], use: Callable[[str, Array], None]) -> None:
        """Call ``use`` once with each tensor in ``sizes``: name → size in bytes, 0 if it is unknown.

        Memory is released portion by portion.
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
        all_portions = list(portions(computed, self.portion_bytes))
        for names in counted(all_portions, "portions of the tensors"):
            arrays = self._runner.run(self.feed, names)
            for name in names:
                use(name, arrays.pop(name))

    def stored(self, sizes: Mapping[str, int], store: ArrayStore) -> dict[str, StoredArray]:
        """Fetch tensors into a store: name → values."""
        arrays: dict[str, StoredArray] = {}

        def keep(name: str, array: Array) -> None:
            arrays[name] = store.keep(array)

        self.fetch(sizes, keep)
        return arrays


def _weight(value: ir.Value, tensor: ir.TensorProtocol) -> Array:
    """The values of an initializer; `InputError` if its external data cannot be read."""
    try:
        return tensor.numpy()
    except (OSError, ValueError) as error:
        raise InputError(f"weight {value.name!r} cannot be read: {error}") from error


def check_has_modules(tagged: TaggedModel, name: str) -> None:
    """Refuse a file without tags and signatures: its tensors cannot be assigned to modules."""
    if tagged.source == "none" and not tagged.signatures:
        raise UntaggedModelError(
            f"{name}: has no module tags; a tool removed them, or it was not exported with htp_export.export(...)"
        )


# --- orders and branches that a run leaves open ---


def with_sorted_results(run: FileRun) -> FileRun:
    """A copy in which nodes with ``sorted=0``, such as TopK, sort their results; ``run`` itself without such nodes."""

    def unsorted(model: ir.Model) -> Iterator[ir.Node]:
        return filter(_is_unsorted, model.graph.all_nodes())

    if not any(unsorted(run.tagged.model)):
        return run
    run = replace(run, tagged=run.tagged.clone())
    for node in unsorted(run.tagged.model):
        node.attributes["sorted"] = ir.AttrInt64("sorted", 1)
    return run


def _is_unsorted(node: ir.Node) -> bool:
    """Whether a node returns its results in any order."""
    if not is_standard(node):
        return False
    attribute = node.attributes.get("sorted")
    return attribute is not None and not attribute.is_ref() and attribute.value == 0


def with_taken_branches(run: FileRun) -> FileRun:
    """A copy with the nodes of the taken branch in place of each ``If``; ``run`` itself without an ``If``.

    The file runs once for each level of ``If`` inside ``If``. Branches in loop bodies are kept.
    """
    if not any(is_standard(node, "If") for node in run.tagged.model.graph):
        return run
    current = replace(run, tagged=run.tagged.clone())
    not_inlined = set[str | None]()
    while True:
        model = current.tagged.model
        branching = [
            node for node in model.graph if is_standard(node, "If") and node.name not in not_inlined
        ]
        if not branching:
            return current
        conditions: dict[str, Array] = {}
        current.fetch({_condition(node): 0 for node in branching}, conditions.__setitem__)
        for node in branching:
            is_true = conditions[_condition(node)].all()
            if not _inline(model, node, "then_branch" if is_true else "else_branch"):
                not_inlined.add(node.name)
        # A new index of the changed graph.
        tagged = TaggedModel(model, run.tagged.hierarchy, run.tagged.source)
        current = replace(current, tagged=tagged)


def _condition(node: ir.Node) -> str:
    """The name of the condition of an ``If``."""
    return str(node.inputs[0].name)  # type: ignore[union-attr] # an `If` has one


def _inline(model: ir.Model, node: ir.Node, branch: str) -> bool:
    """Inline a branch, whose results get the names of the outputs of the ``If``; return whether that is possible."""
    from htp_export.capabilities.optimize.passes.inline_branches import inline_branch

    graph = node.attributes[branch].as_graph()
    # Result of the branch → output of the `If`; other results are tensors of an outer graph.
    pairs = zip(node.outputs, graph.outputs, strict=True)
    results = {value: output for output, value in pairs if value.graph is graph}
    names = {value: output.name for value, output in results.items()}
    if not inline_branch(model, model.graph, node, branch):
        return False
    for value, output in results.items():
        output.name, value.name = None, names[value]
    return True


def numbered_as_in_file(
    tagged: TaggedModel, taken: TaggedModel, calls: Sequence[ModuleCall]
) -> tuple[list[ModuleCall], Mapping[str, int]]:
    """Renumber PyTorch's calls as in a file, which counts the calls of a module in all branches.

    Args:
        tagged: The file.
        taken: The file `with_taken_branches`.
        calls: PyTorch's calls.

    Returns:
        The calls; and, for each module with nodes in branches, the number of its calls outside of
        branches or in taken ones. If this is not the number of calls in PyTorch, the calls of the
        module are not renumbered.
    """
    inside = _modules_in_branches(tagged)
    if taken is tagged or not inside:
        return list(calls), {}
    ran = Counter(call.path for call in calls)
    numbers: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for path in inside:
        if path not in taken:
            continue
        numbers_in_file = _calls_with_nodes(taken, path)
        counts[path] = len(numbers_in_file)
        if counts[path] == ran[path]:
            numbers[path] = numbers_in_file
    renumbered = []
    for call in calls:
        if call.path in numbers:
            call = replace(call, number=numbers[call.path][call.number])
        renumbered.append(call)
    return renumbered, counts


def _modules_in_branches(tagged: TaggedModel) -> dict[str, None]:
    """Modules, without the root, that have nodes in subgraphs."""
    modules: dict[str, None] = {}
    for node in tagged.nodes:
        if node.graph is not tagged.model.graph:
            modules.update(dict.fromkeys(filter(None, tagged.work_of(node).modules)))
    return modules


def _calls_with_nodes(tagged: TaggedModel, path: str) -> list[int]:
    """Numbers of the calls of a module that have nodes."""
    region = tagged[path]
    if region.calls <= 1:
        return [0] if region.nodes else []
    return [number for number in range(region.calls) if region.call(number).nodes]


# --- precision ---

_BITS = {ir.DataType.FLOAT16: 1, ir.DataType.BFLOAT16: 2}
"""Type of half precision → bit; the bits of a tensor are the types that it is computed from."""

_NAMES = {1: "float16", 2: "bfloat16", 3: "bfloat16"}
"""Bits → name of the coarsest type."""


def half_precisions(tagged: TaggedModel) -> Mapping[str, str]:
    """Tensor of the main graph → the coarsest half-precision type among it and the tensors it is computed from.

    A cast to float32 does not make a tensor more exact.
    """
    if not _has_halves(tagged):
        return {}
    starts: dict[ir.Value | None, int] = {}
    for name, value in tagged.typed.items():
        if value.dtype in _BITS:
            starts[tagged.values[name]] = _BITS[value.dtype]
    bits = dependence(reads_and_results(tagged.model.graph.all_nodes()), starts)
    return {name: _NAMES[bits[value]] for name, value in tagged.values.items() if value in bits}


def _has_halves(tagged: TaggedModel) -> bool:
    """Whether a declared type or a cast is of half precision; otherwise, types need not be inferred."""
    if any(value.dtype in _BITS for value in tagged.values.values()):
        return True
    halves = list(_BITS)
    casts = (node for node in tagged.nodes if is_standard(node, "Cast"))
    return any(node.attributes.get_int("to", 0) in halves for node in casts)
