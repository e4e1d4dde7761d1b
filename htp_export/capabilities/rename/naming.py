"""`rename`: names of nodes and tensors that show their place in the module tree."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.editing.flattening import dissolved
from htp_export.editing.function_records import DOMAIN
from htp_export.editing.path_names import Renamed, check_style, check_tags, give_path_names
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import HoldsModel, ModelSource, for_change, load
from htp_export.reporting.columns import Column
from htp_export.reporting.result import Table

_MOST_LINES = 40  # rows in text, which should fit on a screen


@dataclass(frozen=True)
class Named(HoldsModel, Renamed):
    """The result of `rename`.

    Attributes:
        model: The model.
        style: The style of the names.
        nodes: Old name → new name of each node whose name changed. Nodes without a name are
            omitted; of several with one name, the first in the graph counts.
        tensors: The same for tensors, also in subgraphs.
        nodes_total: Number of nodes.
        tensors_total: Number of tensors.
    """

    model: ir.Model = field(repr=False, kw_only=True)
    style: str = field(kw_only=True)

    @property
    def summary(self) -> str:
        """The numbers of changed names, in one line."""
        nodes = f"{len(self.nodes)} of {self.nodes_total} nodes"
        return f"renamed {nodes} and {len(self.tensors)} of {self.tensors_total} tensors (style {self.style!r})"

    def table(self) -> Table | None:
        """The first changed names, one row each."""
        rows = list(self.nodes.items())[:_MOST_LINES]
        if not rows:
            return None
        more = len(self.nodes) - _MOST_LINES
        if more > 0:
            rows.append((f"… and {more} more", ""))
        return NAME_COLUMNS, rows


NAME_COLUMNS: tuple[Column[tuple[str, str]], ...] = (
    Column("before", "node before", lambda item: item[0], right=False),
    Column("after", "node after", lambda item: item[1], style="cyan", right=False),
)
"""The columns of changed node names."""


@names_model_faults("model")
def rename(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    style: str = "path",
    share_weights: bool = False,
) -> Named:
    """Name nodes and tensors after module paths: ``/encoder/layer.0/attention/self/query/MatMul``.

    Other tools keep and show names, and select nodes by them. The names are unique, and depend only
    on tags and on the graph: they are the same for the same model, independent of its old names.
    Inputs and outputs of the model and parameters keep their names. Nothing else changes; tags,
    signatures and the rest of the metadata use the new names. See ``docs/rename.md``.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed. It needs tags of htp_export; weights are not loaded.
        output: The file to write.
        style: The style of the names; only ``"path"`` exists.
        share_weights: As for `htp_export.tap`.

    Returns:
        The model, and old name → new name of nodes and tensors.

    Raises:
        FileError: A file cannot be read or written.
        InputError: There is no such style, or the functions of the model cannot be read.
        UntaggedModelError: The model has no tags of htp_export.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> named = htp_export.rename(program)
        >>> dict(named.nodes), dict(named.tensors)
        ({'node_linear': '/0/Gemm', 'node_relu': '/1/Relu'}, {'linear': '/0/Gemm_output_0'})
    """
    from htp_export.alignment.origin_map import renew_map
    from htp_export.capabilities.functions.nesting import functions

    check_style(style)
    check_target(output)
    tagged = load(model)
    check_tags(tagged)
    bodies = {key for key in tagged.model.functions if key[0] == DOMAIN}
    # Functions of modules are written again after their nodes were renamed.
    nested: dict[str, None] = {}
    for node in all_nodes(tagged.model):
        if node.op_identifier() in bodies:
            nested.update((f"re:{re.escape(owner)}", None) for owner in tagged.owners_of(node))
    had_map = tags.MAP in tagged.model.metadata_props
    work = dissolved(tagged) if nested else for_change(tagged, model)
    renamed = give_path_names(work)
    named = functions(work.model, [*nested]).model if nested else work.model
    renew_map(named, had_map=had_map)
    if output is not None:
        write_model(named, output, share_weights=share_weights)
    return Named(**vars(renamed), model=named, style=style)
