"""The modules that get a precision of their own: those with weights, at some depth or of a selector."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import Part
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.plans.deciders import Deciders
from htp_export.results.drawn_levels import drawn_parents
from htp_export.weights.products import products_of

__all__ = ["check_apart", "deciding_modules"]


def deciding_modules(
    tagged: TaggedModel, select: str | Sequence[str] | None = None, depth: int | None = None
) -> list[str]:
    """The modules whose precision is chosen one by one.

    Modules that own the same nodes, as a Conv and its BatchNorm, are one decision: the module that keeps the weight.

    Args:
        tagged: The model, without functions.
        select: These modules; see ``TaggedModel.select``. Those without weights are left out.
        depth: The modules at this level below the root, as ``tree`` draws it, and those above it that hold weights
            themselves. None for the innermost modules with weights.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> deciding_modules(htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)))
        ['0', '2']
    """
    tagged.require_tags()
    if select is not None and depth is not None:
        raise InputError("give select or depth, not both")
    deciding = _deciding_parts(tagged)
    holding = {part.call.path for parts in deciding for part in parts}
    if select is not None:
        around = {path for parts in deciding for part in parts for path in part.modules}
        found = [path for path in tagged.select(select) if path in around]
    elif depth is None:
        found = [path for path in tagged if path in holding]
    else:
        if depth < 0:
            raise InputError(f"depth counts levels from 0, not {depth}")
        levels = _levels(tagged)
        above = {path: [up for up in tags.ancestors(path) if levels.get(up) == depth] for path in holding}
        at_depth = {ups[0] if ups else path for path, ups in above.items()}
        found = [path for path in tagged if path in at_depth]
    if not found:
        raise InputError("none of these modules has weights that can be quantized")
    return found


def check_apart(paths: Sequence[str]) -> None:
    """Refuse modules that lie in each other: a weight would have two precisions."""
    for path in paths:
        above = next((other for other in paths if other != path and tags.is_under(path, other)), None)
        if above is not None:
            raise InputError(f"module {path!r} lies in {above or '(root)'!r}; choose one of them")


def _deciding_parts(tagged: TaggedModel) -> list[tuple[Part, ...]]:
    """For each node with weights, the parts of its work that decide; modules with the same nodes are one decision."""
    deciders = Deciders(tagged)
    weighted = dict.fromkeys(product.node for product in products_of(tagged, tagged.nodes))
    found = {node: deciders.of(node) for node in weighted}
    nodes: defaultdict[str, set[ir.Node]] = defaultdict(set)
    for node, parts in found.items():
        for part in parts:
            nodes[part.call.path].add(node)
    alike: dict[frozenset[ir.Node], str] = {}
    chosen = {alike.setdefault(frozenset(own), path) for path, own in nodes.items()}
    return [tuple(part for part in parts if part.call.path in chosen) for parts in found.values()]


def _levels(tagged: TaggedModel) -> dict[str, int]:
    modules = {path: content.facts for path, content in contents_of(tagged).modules.items()}
    levels: dict[str, int] = {}
    for path, parent in drawn_parents(modules).items():
        levels[path] = 0 if parent is None else levels[parent] + 1
    return levels
