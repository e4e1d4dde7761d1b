"""optimize(): fewer nodes, and the tags that were there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from htp_export.capabilities.optimize.registry import Level, choose
from htp_export.capabilities.optimize.results import Optimized
from htp_export.capabilities.optimize.running import OutputCheck, Pipeline
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource
from htp_export.runtime.data import Data, Samples


@names_model_faults("model")
def optimize(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    passes: str | Sequence[str] = "default",
    level: Level = "exact",
    verify: bool = False,
    keep_exact: bool = False,
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    external_data: str | None = None,
    share_weights: bool = False,
) -> Optimized:
    """Reduce the number of nodes of a model, and keep its tags correct.

    A node that replaces others gets the owners of all of them. A module that lost a tensor at its boundary becomes
    ``fused`` with the modules with which it was merged.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write.
        passes: ``"default"``, or names of passes as a list or separated by commas; ``"default"`` among them stands for
            all default passes. See `htp_export.passes.available`.
        level: ``"exact"``: outputs stay equal, bit for bit; ``"tolerant"``: they may change by 1e-5; ``"fused"``: as
            ``"tolerant"``, with operators that only ONNX Runtime has.
        verify: Run the model in ONNX Runtime before and after every pass. A pass that changes more than its level
            allows is undone and listed in the result.
        keep_exact: Leave out rewrites that make a module inexact although all its inputs and outputs stay in the graph.
            Takes a few more nodes at level ``"fused"``.
        data: The runs of ``verify``, as for `quantize`; None for one run on random inputs.
        dims: Name of an open dimension → size. ``data`` of other sizes are refused.
        shapes: For random inputs: input name → shape.
        seed: Seed of the random inputs.
        external_data: Name of a file beside ``output`` for all weights of more than 256 bytes.
        share_weights: Leave external weights in the data file of another model in the folder of ``output``: no copy.

    Returns:
        The model, and what each pass did to each module.

    Raises:
        InputError: There is no such pass or level, or ``verify`` cannot run the model.
        FileError: A file cannot be read or written.
        PassError: A pass fails; nothing is written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> result = htp_export.optimize(exported, level="tolerant", verify=True)
        >>> result.nodes_after <= result.nodes_before, result.max_abs <= 1e-5
        (True, True)
    """
    from htp_export.capabilities.huggingface.genai import note_shared_cache

    check_target(output)
    chosen = choose(passes, level)
    original = read_flat(model, others=False)
    nodes_before = len(original.nodes)
    if not verify and (data is not None or dims or shapes or seed):
        raise InputError("data, sizes and seed are for verify, which runs the model; give verify, or leave them out")
    check = None
    if verify:
        check = OutputCheck(original.model, Samples.of(data, original.model, dims=dims, shapes=shapes, seed=seed))
    pipeline = Pipeline(chosen, check, keep_exact=keep_exact)
    optimized = pipeline.run(original if isinstance(model, str | os.PathLike) else original.clone())
    if output is not None:
        write_model(optimized.model, output, external_data, share_weights=share_weights)
        note_shared_cache(optimized.model.graph, output)
    return Optimized(
        nodes_before,
        len(optimized.nodes),
        pipeline.reports,
        None if check is None else check.max_abs,
        () if check is None else check.nan,
        model=optimized.model,
    )
