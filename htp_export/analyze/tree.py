"""The module tree of a file, with what each module came to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from htp_export import tags
from htp_export.tagged import TaggedModel

__all__ = ["ModuleRow", "ModuleTree", "tree_rows"]


@dataclass(frozen=True)
class ModuleRow:
    """One module of the tree.

    Attributes:
        path: The module's path; ``""`` is the root.
        class_name: Its fully qualified class.
        calls: How many times it ran.
        fate: What became of it.
        nodes: Nodes in its region.
        own_nodes: Nodes that it computes itself, and no module below it.
        parameters: Elements of the tensors of weights that its region reads, each tensor once: initializers of
            floating point that are no scalars. What several modules read counts in each of them, so that the sum
            over modules may exceed the whole.
    """

    path: str
    class_name: str
    calls: int
    fate: str
    nodes: int
    own_nodes: int
    parameters: int

    @property
    def simple_class(self) -> str:
        """The class without its module."""
        return self.class_name.rpartition(".")[2]


@dataclass(frozen=True)
class ModuleTree:
    """The rows of a module tree, in the order of ``named_modules()``.

    Attributes:
        rows: One for each module shown.
        untagged: Nodes of the model that belong to no module.
    """

    rows: tuple[ModuleRow, ...]
    untagged: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The tree as plain data, for JSON.

        Example:
            >>> ModuleTree((ModuleRow("", "net.Net", 1, "computed", 3, 1, 20),)).to_dict()["modules"][""]["nodes"]
            3
        """
        modules = {row.path: {k: v for k, v in asdict(row).items() if k != "path"} for row in self.rows}
        return {"modules": modules, "untagged": self.untagged}

    def __str__(self) -> str:
        header = ("module", "class", "calls", "fate", "nodes", "own nodes", "parameters")
        body = [
            (r.path or "(root)", r.simple_class, r.calls, r.fate, r.nodes, r.own_nodes, f"{r.parameters:,}")
            for r in self.rows
        ]
        widths = [max(len(str(cell)) for cell in column) for column in zip(header, *body, strict=True)]
        layout = "{:<%d}  {:<%d}  {:>%d}  {:<%d}  {:>%d}  {:>%d}  {:>%d}" % tuple(widths)  # noqa: UP031 - braces stay
        lines = (layout.format(*cells) for cells in (header, *body))
        note = (f"{self.untagged} nodes belong to no module",) if self.untagged else ()
        return "\n".join((*lines, *note))


def tree_rows(tagged: TaggedModel, depth: int | None = None, select: str | Sequence[str] | None = None) -> ModuleTree:
    """What each module of a model came to.

    Args:
        tagged: The model.
        depth: Leave out modules more than so many levels below the root, whose depth is 0; all where it is None.
            Containers that never run (``nn.ModuleList``) are no level: they are as deep as what they hold.
        select: Only the modules that this selector names, and those above them, which say where they are.

    Raises:
        SelectorError: If the selector cannot be read or matches nothing.
        UntaggedModelError: If the model has no tags.
        ValueError: If ``depth`` is negative.
    """
    if depth is not None and depth < 0:
        raise ValueError(f"depth counts levels from 0, not {depth}")
    shown = set(tagged.paths if select is None else tagged.select(select))
    shown = {up for path in shown for up in tags.ancestors(path)}
    level: dict[str, int] = {}
    for path in tagged.paths:  # a module stands after those above it
        parent = tagged.hierarchy.parent(path)
        above = 0 if parent is None else level.get(parent, 0)
        level[path] = above + (parent is not None and (parent in tagged.hierarchy.called or not parent))
    rows = tuple(
        _row(tagged, path) for path in tagged.paths if path in shown and (depth is None or level[path] <= depth)
    )
    return ModuleTree(rows, len(tagged.untagged))


def _row(tagged: TaggedModel, path: str) -> ModuleRow:
    region = tagged[path]
    return ModuleRow(
        path=path,
        class_name=region.class_name,
        calls=region.calls,
        fate=region.fate,
        nodes=len(region.nodes),
        own_nodes=len(region.own_nodes),
        parameters=sum(map(_elements, region.parameters)),
    )


def _elements(initializer: ir.Value) -> int:
    """Elements of an initializer that holds weights, from its shape: values are not read."""
    tensor = initializer.const_value
    if tensor is None or not tensor.dtype.is_floating_point() or not len(tensor.shape):
        return 0  # indices, sizes and scalars that an exporter made initializers
    return math.prod(tensor.shape.numpy())
