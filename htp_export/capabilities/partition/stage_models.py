"""The part of a graph that one stage runs, as a model of its own with the modules that are in it."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.partition.stage_cuts import StageCut
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.cut_models import cut_graph, model_around, narrow_owners, write_part_metadata
from htp_export.model.tagged import TaggedModel, all_nodes

__all__ = ["stage_model"]


def stage_model(tagged: TaggedModel, stage: StageCut) -> ir.Model:
    """A stand-alone model of a stage; it shares the tensors of its weights with the whole model.

    Its module tree has the modules that have nodes in it, what lies below those that are whole, and what lies above.
    What PyTorch gave to modules and got back is kept for the whole ones.

    Args:
        tagged: The model that was cut.
        stage: The stage.
    """
    graph, _ = cut_graph(tagged, stage.part)
    model = model_around(tagged, graph)
    tree = tagged.hierarchy
    modules = frozenset(stage.modules)
    whole = {path for path in tree if any(up in modules for up in tags.ancestors(path))}
    first = {owners[0] for node in all_nodes(model) if (owners := tagged.owners_of(node))}
    inside = whole | first | tags.all_above(first) | {""}
    narrow_owners(tagged, model, inside.__contains__, "")
    stage_tree = Hierarchy(tree[path] for path in tree if path in inside)
    signatures = {path: calls for path, calls in tagged.signatures.items() if path in whole}
    write_part_metadata(tagged, model, stage_tree, tagged.calls.among(stage_tree), signatures, inside.__contains__)
    return model
