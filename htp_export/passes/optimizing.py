"""optimize(): fewer nodes, and the tags that were there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from htp_export.files.model_files import check_target, write_model
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import ModelSource
from htp_export.passes.checking import OutputCheck
from htp_export.passes.pipeline import Pipeline
from htp_export.passes.registry import Level, choose
from htp_export.passes.results import Optimized

__all__ = ["optimize"]


@names_model_faults("model")
def optimize(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    passes: str | Sequence[str] = "default",
    level: Level = "exact",
    verify: bool = False,
    *,
    keep_exact: bool = False,
    inputs: Mapping[str, Any] | None = None,
    external_data: str | None = None,
    share_weights: bool = False,
) -> Optimized:
    """Make a model's graph smaller, and keep its tags true.

    Every node that is left or new says whose work it does: a node that replaces others has the owners of all of them.
    A module one of whose tensors was merged away is ``fused`` from then on, and names the modules with which.

    Args:
        model: The model. A model in memory is not changed.
        output: The file to write.
        passes: ``"default"``, or names of passes, as a list or with commas, ``"default"`` among them for all default
            passes; see `htp_export.passes.available`.
        level: What may happen to the results: ``"exact"``, outputs stay the same bit for bit; ``"tolerant"``, they may
            change by 1e-5; ``"fused"``, operators that only ONNX Runtime has are used, too.
        verify: Run the model in ONNX Runtime before and after every pass. A pass that breaks its level is undone and
            named in the result.
        keep_exact: Leave out every rewrite that makes a module inexact although each tensor that it takes or gives
            stays in the graph: one node would compute both sides of its border. A few nodes more, at level ``"fused"``.
        inputs: The model's inputs by name, for ``verify``; random ones where it is None.
        external_data: Name of a file beside ``output`` that takes all weights of more than 256 bytes.
        share_weights: Leave external weights in the data file of another model in the folder of ``output``, and write
            no copy. If that file changes, ``output`` is not read any more.

    Raises:
        InputError: If there is no such pass or level, or if ``verify`` cannot run the model.
        FileError: If a file cannot be read or written.
        PassError: If a pass fails; nothing is written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> result = htp_export.optimize(exported, level="tolerant", verify=True)
        >>> result.nodes_after <= result.nodes_before, result.max_abs <= 1e-5
        (True, True)
    """
    check_target(output)
    chosen = choose(passes, level)
    original = read_flat(model, others=False).model
    nodes_before = sum(1 for _ in all_nodes(original))
    check = OutputCheck(original, inputs) if verify else None
    pipeline = Pipeline(chosen, check, keep_exact=keep_exact)
    optimized = pipeline.run(original if isinstance(model, str | os.PathLike) else original.clone())
    if output is not None:
        write_model(optimized, output, external_data, share_weights=share_weights)
    return Optimized(
        nodes_before,
        sum(1 for _ in all_nodes(optimized)),
        pipeline.attribution,
        pipeline.reports,
        None if check is None else check.max_abs,
        model=optimized,
    )
