"""A PyTorch model that does not export as a whole: its modules, each exported alone."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from htp_export.differences.equal_modules import call_signature
from htp_export.exporter.capture.patches import translations_read_once
from htp_export.exporter.exporting import export
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.module_paths import module_paths
from htp_export.model.tag_facts import TagFacts
from htp_export.model.tagged import load
from htp_export.show.inventory import Inventory, ModuleEntry
from htp_export.show.measures import Measure
from htp_export.show.node_facts import NodeEntry
from htp_export.show.shown_graph import ShownGraph, shown_graph

if TYPE_CHECKING:
    import torch

__all__ = ["graphs_of_module"]

_log = logging.getLogger(__name__)

_LONGEST = 300  # characters of an error that are kept


def graphs_of_module(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    statistics: bool = False,
    **options: Any,
) -> list[ShownGraph]:
    """A PyTorch model, exported to memory, ready to be drawn: the graphs between which its page has a choice.

    Where the model does not export, its modules are exported one by one, with what they are given in one run of it:
    those that do not export in turn by their own modules. Each module that fails says why. Modules that are alike, and
    are given alike tensors, are exported once.

    Args:
        model: The model; it is left as it was.
        args: Its arguments.
        kwargs: Its arguments by keyword.
        statistics: Read every weight of a model that exports as a whole, and say what its values are like.
        options: Further arguments of ``export``.

    Raises:
        TypeError: If no output could be read, as ``export`` does.
    """
    with translations_read_once():
        try:
            return [_exported(model, tuple(args), dict(kwargs or {}), options, statistics)]
        except Exception as error:  # whatever torch raises on what it cannot export
            parts = _Parts(model, options)
            failure = parts.run(tuple(args), dict(kwargs or {}))
            parts.take("", _text(error) if failure is None else failure)
            partial = parts.inventory()
            unread = ("The weights were not read: of parts that are alike, one is exported.",) if statistics else ()
            noted = replace(partial, notes=(*partial.notes, *unread))
            return [ShownGraph(noted, parts.measures())]


def _exported(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any],
    statistics: bool = False,
) -> ShownGraph:
    stderr = io.StringIO()  # torch prints the graph of what fails; the page says why
    try:
        with contextlib.redirect_stderr(stderr):
            program = export(model, args, kwargs=kwargs, **{"verbose": False, "dynamo": True, **options})
    finally:
        _log.debug("%s", stderr.getvalue())
    if program is None:
        raise TypeError("a model is shown from memory; leave out f and dynamo=False")
    return shown_graph(load(program), statistics=statistics)


class _Parts:
    """The modules of one model, those that were exported alone and those that failed."""

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = options
        self._tree = Hierarchy.from_module(model)
        self._modules = {path: module for path, _, module in module_paths(model)}
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._counts = Counter[str]()
        self._failures: dict[str, str] = {}
        self._done: dict[str, ShownGraph] = {}  # of modules that were exported alone
        self._exports: dict[Hashable, ShownGraph | str] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Run the model once and note what each module was given; why it failed, if it did."""
        import torch

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for path in self._tree:
                note = functools.partial(self._note, path)
                hooks.callback(self._modules[path].register_forward_pre_hook(note, with_kwargs=True).remove)
            try:
                self._model(*args, **kwargs)
            except Exception as error:  # the modules that ran until then can be shown all the same
                return _text(error)
        return None

    def _note(self, path: str, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.setdefault(path, (args, kwargs))
        self._counts[path] += 1

    def take(self, path: str, failure: str) -> None:
        """Export the modules below one that failed; those that fail too, by their own."""
        self._failures[path] = failure
        for child in self._children(path):
            result = self._part(child)
            if isinstance(result, str):
                self.take(child, result)
            else:
                self._done[child] = result

    def _part(self, path: str) -> ShownGraph | str:
        """A module exported alone, or why that failed; of modules that are alike, the first is exported."""
        module, (args, kwargs) = self._modules[path], self._calls[path]
        alike = call_signature(module, args, kwargs)
        if alike not in self._exports:
            try:
                self._exports[alike] = _exported(module, args, kwargs, self._options)
            except Exception as error:
                self._exports[alike] = _text(error)
        return self._exports[alike]

    def _children(self, path: str) -> Iterator[str]:
        """The modules below that ran; containers are looked into."""
        for child in self._tree.children(path):
            if child in self._calls:
                yield child
            else:
                yield from self._children(child)

    def inventory(self) -> Inventory:
        """All of it: the whole tree, with the nodes of what was exported."""
        nodes: list[NodeEntry] = []
        entries: dict[str, ModuleEntry] = {}
        inventories = {prefix: part.inventory for prefix, part in self._done.items()}
        for prefix, part in inventories.items():
            entries |= {_below(prefix, path): m for path, m in _moved(prefix, part, len(nodes)).items()}
            nodes += [_moved_node(prefix, node, len(nodes)) for node in part.nodes]
        counted = self._tree.with_results(calls=self._counts)
        modules = {path: entries.get(path) or ModuleEntry(**vars(info)) for path, info in counted.items()}
        for path in modules:
            inside = [part.modules[""] for prefix, part in inventories.items() if tags.is_under(prefix, path)]
            if path not in entries and inside:
                modules[path] = _sum(modules[path], inside)
            if path in self._failures:
                modules[path] = replace(modules[path], failure=self._failure_text(path))
        return Inventory(
            name=type(self._model).__name__,
            tags=TagFacts("htp", Counter(node.reason for node in nodes)),
            modules=modules,
            nodes=tuple(nodes),
            called=counted.called | {""},
            notes=(
                f"This model does not export as a whole. {len(self._done)} of its modules were exported alone, "
                f"and {len(self._innermost())} could not be: see those whose fate is failed.",
            ),
        )

    def measures(self) -> list[Measure]:
        """The numbers of the parts, each at its place; a module above them has their sum."""
        kinds = {measure.key: measure for part in self._done.values() for measure in part.measures}
        return [self._measure(kind) for kind in kinds.values() if kind.additive]

    def _measure(self, kind: Measure) -> Measure:
        total, own, nodes = Counter[str](), dict[str, float](), dict[str, float]()
        for prefix, part in self._done.items():
            for measure in part.measures:
                if measure.key != kind.key:
                    continue
                total.update({_below(prefix, path): value for path, value in measure.total.items()})
                total.update({path: measure.total[""] for path in tags.ancestors(prefix) if path != prefix})
                own |= {_below(prefix, path): value for path, value in measure.own.items()}
                nodes |= {f"{prefix}/{name}": value for name, value in measure.nodes.items()}
        return replace(kind, total=dict(total), own=own, nodes=nodes)

    def _innermost(self) -> list[str]:
        return [
            path
            for path in self._failures
            if not any(deeper != path and tags.is_under(deeper, path) for deeper in self._failures)
        ]

    def _failure_text(self, path: str) -> str:
        culprits = [deeper for deeper in self._innermost() if deeper != path and tags.is_under(deeper, path)]
        return f"because of {', '.join(culprits)}" if culprits else self._failures[path]


def _moved(prefix: str, part: Inventory, offset: int) -> dict[str, ModuleEntry]:
    return {
        path: replace(
            module,
            path=_below(prefix, path),
            fused_with=tuple(_below(prefix, partner) for partner in module.fused_with),
            own_nodes=tuple(position + offset for position in module.own_nodes),
            tied={f"{prefix}.{name}": f"{prefix}.{first}" for name, first in module.tied.items()},
        )
        for path, module in part.modules.items()
    }


def _moved_node(prefix: str, node: NodeEntry, offset: int) -> NodeEntry:
    return replace(
        node,
        name=f"{prefix}/{node.name}",
        owners=tuple(_below(prefix, owner) for owner in node.owners),
        module=_below(prefix, node.module),
        inputs=tuple(
            link._replace(tensor=f"{prefix}/{link.tensor}", node=None if link.node is None else link.node + offset)
            for link in node.inputs
        ),
        outputs=tuple(replace(tensor, name=f"{prefix}/{tensor.name}") for tensor in node.outputs),
    )


def _sum(module: ModuleEntry, inside: Sequence[ModuleEntry]) -> ModuleEntry:
    operators = Counter[str]()
    for part in inside:
        operators.update(part.operators)
    return replace(
        module,
        nodes=sum(part.nodes for part in inside),
        parameters=sum(part.parameters for part in inside),
        weight_bytes=sum(part.weight_bytes for part in inside),
        operators=dict(operators.most_common()),
    )


def _below(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _text(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    cause = error.__cause__ or error
    first_line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first_line}"[:_LONGEST]
