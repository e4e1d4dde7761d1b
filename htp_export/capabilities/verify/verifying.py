"""``verify``: compare a PyTorch model with its ONNX file, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from htp_export.attention.decomposing import attention_as_in
from htp_export.capabilities.verify.checking import Tolerances, input_arguments, unmatched_calls
from htp_export.capabilities.verify.file_run import (
    FileRun,
    check_has_modules,
    numbered_as_in_file,
    with_sorted_results,
    with_taken_branches,
)
from htp_export.capabilities.verify.locating import (
    first_not_finite,
    line_at_fault,
    module_results,
    tolerance_of,
    with_contradictions,
    with_missing_outputs,
)
from htp_export.capabilities.verify.pytorch_run import (
    ModuleCall,
    evaluating,
    parameter_readers,
    record_calls,
)
from htp_export.capabilities.verify.results import Verification
from htp_export.capabilities.verify.same_model import (
    check_same_model,
    check_same_modules_ran,
    known_parameters,
    misplaced_parameters,
)
from htp_export.capabilities.verify.special_runs import Dump, DumpedRun, check_run
from htp_export.capabilities.verify.training_mode import training_nodes
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.exporter.capture.calls import arguments_by_name, defaults_of
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.export_arguments import prepare_caches
from htp_export.exporter.export_cache import call_of, model_and_call
from htp_export.format.leaves import named_leaves, named_tensors_in
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.runtime.arrays import PORTION_BYTES, ArrayStore
from htp_export.runtime.declared_inputs import array_for
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.settings import RunSettings

if TYPE_CHECKING:
    import torch
    from torch import nn


@names_model_faults("onnx")
def verify(
    model: nn.Module | torch.onnx.ONNXProgram,
    onnx: ModelSource | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    isolated: bool = False,
    outputs_from: Dump | None = None,
    select: str | Sequence[str] | None = None,
    tolerances: Mapping[str, tuple[float, float]] | None = None,
    portion_bytes: int = PORTION_BYTES,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
) -> Verification:
    """Compare a PyTorch model with its ONNX file, module by module.

    PyTorch runs once, in eval mode, with hooks on every module. ONNX Runtime runs the file without
    optimisation and returns the tensors that modules return. ``docs/verify.md`` describes how they
    are compared. The model and the arguments are restored afterwards, also on errors.

    The program that `htp_export.export` returned suffices while its model and example inputs are
    alive: ``verify(program)``. Without arguments, a file that this process exported from the model
    is verified with the example inputs of its export.

    Not thread-safe for one PyTorch model, because of the hooks.

    Args:
        model: The PyTorch model; or, as the only argument, the program that `htp_export.export`
            returned for it.
        onnx: The exported model: a file, or a model in memory.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        isolated: Run the nodes of each module alone, on the inputs of the module in PyTorch, so
            that an error is reported for the module that causes it.
        outputs_from: Tensors of the file that another engine computed on the same arguments: an
            ``.npz`` file, or name → array. ONNX Runtime is not run; modules without a tensor there
            are not compared, and the result's ``next_outputs`` names the tensor that halves the
            modules in doubt.
        select: Only these modules; see ``TaggedModel.select``.
        tolerances: Selector → absolute and relative tolerance of the outputs of these modules; the
            last selector that matches applies.
        portion_bytes: Bytes of tensors that are fetched in one run, and of PyTorch's tensors that
            stay in memory; the rest goes into temporary files.
        providers: ONNX Runtime's execution providers, in order of preference.
        session_options: An ``onnxruntime.SessionOptions``: threads, custom operators and so on.
            Optimisation is always off; the setting is restored afterwards.

    Returns:
        The result for every module: ``.ok``, ``.first_wrong``, ``.modules[path].max_abs``,
        ``.modules[path].status``.

    Raises:
        InputError: The file is of another model, the model or the file cannot run on these
            arguments, a selector matches nothing, the model or the example inputs of an export no
            longer exist, or ``outputs_from`` has none of its tensors, or was computed from other
            inputs.
        FileError: The file cannot be read.
        UntaggedModelError: The file has no module tags.

    Examples:
        >>> import torch, htp_export
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), torch.randn(2, 4)
        >>> program = htp_export.export(net, (x,), verbose=False)
        >>> result = htp_export.verify(net, program, (x,))
        >>> result.ok, result.first_wrong, result.modules["0"].status
        (True, None, 'agrees')
        >>> htp_export.verify(program).ok
        True
    """
    settings = RunSettings(providers=providers, session_options=session_options)
    if isolated and outputs_from is not None:
        raise InputError(
            "isolated runs parts of the file, and outputs_from replaces the run: give one of them"
        )
    model, onnx, args, kwargs = _exported_call(model, onnx, args, kwargs)
    # A model appends to a cache among its arguments: register caches with torch's pytree, so that
    # `record_calls` can copy them.
    prepare_caches(args, kwargs, None)
    tagged, name = read_flat(onnx), name_of(onnx, "the ONNX model")
    check_has_modules(tagged, name)
    chosen = set(tagged.paths if select is None else tagged.select(select))
    with attention_as_in(tagged.hierarchy, model):
        check_same_model(tagged, model, name)
        feed = feed_of_call(tagged, model, args, kwargs, name)
        run = FileRun(tagged, name, feed, settings, portion_bytes)
        run = with_sorted_results(run) if outputs_from is None else DumpedRun.of(run, outputs_from)
        return _verified(
            run,
            model,
            args,
            kwargs,
            chosen,
            tolerance_of(tagged, tolerances or {}),
            isolated=isolated,
        )


def _exported_call(
    model: nn.Module | torch.onnx.ONNXProgram,
    onnx: ModelSource | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> tuple[nn.Module, ModelSource, Sequence[Any], dict[str, Any]]:
    """Return the model, its file and the arguments; an export in this process provides missing ones."""
    from torch.onnx import ONNXProgram

    exported_call = None
    if isinstance(model, ONNXProgram):
        if onnx is not None:
            raise InputError(
                "a program includes its model and file: give verify(program), or verify(model, program)"
            )
        onnx = model
        model, exported_call = model_and_call(onnx)
    elif onnx is None:
        raise InputError(
            "verify takes a model and its file, or the program that htp_export.export returned"
        )
    elif not args and not kwargs:
        exported_call = call_of(model, onnx)
    if args or kwargs or exported_call is None:
        return model, onnx, args, dict(kwargs or {})
    return model, onnx, exported_call[0], exported_call[1]


def _verified(
    run: FileRun,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chosen: Collection[str],
    allowed: Tolerances,
    *,
    isolated: bool,
) -> Verification:
    """Run both, and compare the chosen modules; the model is known to have the modules of the file."""
    tagged = run.tagged
    exact = tagged.source != "torch"  # torch's own scopes have wrong module paths
    with ArrayStore.opened(run.portion_bytes) as store:
        calls, readers = _recorded(run, model, args, kwargs, chosen, store)
        ran = Counter(call.path for call in calls)
        taken = run if isinstance(run, DumpedRun) else with_taken_branches(run)
        calls, calls_taken = numbered_as_in_file(tagged, taken.tagged, calls)
        unmatched = unmatched_calls(tagged, ran, calls_taken)
        compared = [call for call in calls if call.path in chosen and call.path not in unmatched]
        for call in compared:
            if None in call.outputs:
                unmatched[call.path] = _NO_VALUES
        checked, blame, reasons, next_outputs = check_run(
            taken, compared, store, allowed, isolated=isolated
        )
    blame = with_contradictions(tagged, with_missing_outputs(tagged, blame, calls[-1]), chosen)
    parameters = known_parameters(tagged, model) if exact else {}
    drawing = {call.path for call in calls if call.draws}
    training = training_nodes(tagged, blame.modules, drawing) if blame.modules else ()
    modules = module_results(
        tagged, chosen, checked, blame, {**reasons, **unmatched}, isolated=isolated
    )
    wrong = tuple(path for path in blame.modules if path in modules)
    return Verification(
        modules=modules,
        wrong=wrong,
        source=line_at_fault(taken.tagged, modules, wrong[0]) if wrong else "",
        isolated=isolated,
        next_outputs=next_outputs,
        tags=(tagged.tag_facts,),
        not_finite=first_not_finite(taken.tagged, checked),
        parameters=len(parameters),
        misplaced=misplaced_parameters(tagged, parameters, readers, model),
        training=training,
    )


def _recorded(
    run: FileRun,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chosen: Collection[str],
    store: ArrayStore,
) -> tuple[list[ModuleCall], Mapping[str, frozenset[str]]]:
    """Run PyTorch; return the calls of all modules, and the modules that read each parameter."""
    tagged = run.tagged

    def wanted(path: str, number: int, argument: str) -> bool:
        signature = tagged.signature(path, number)
        if path not in chosen or signature is None:
            return False
        return signature.inputs.get(argument) is not None

    # `evaluating` may wait for other threads: `unchanged` begins after it, to keep the changes that
    # they make meanwhile.
    with evaluating(model), unchanged(model, (args, kwargs)):
        with parameter_readers(model) as readers:
            calls = record_calls(model, args, kwargs, store, wanted)
        if tagged.source != "torch":
            # Inside the block: a model may add modules while it runs, which are removed again.
            ran = Counter(call.path for call in calls)
            check_same_modules_ran(tagged, model, ran, run.name)
    return calls, readers


_NO_VALUES = "some of its tensors have no values of their own in PyTorch: torch.vmap runs it, or they are sparse"


def feed_of_call(
    tagged: TaggedModel, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> dict[str, npt.NDArray[Any]]:
    """Convert the arguments of a call of the model to inputs of the file.

    Arguments are matched by the signature in the file, otherwise by name, otherwise in order. A
    number, also a default of ``forward``, is an input if the exporter converted it to one, as
    TorchScript's exporter does.

    Raises:
        InputError: The arguments do not fit the inputs.
    """
    inputs = Inputs.of(tagged.model)
    call = arguments_by_name(model.forward, tuple(args), kwargs)
    values: dict[str, Any] = dict(named_tensors_in(call))
    names = input_arguments(tagged)
    leaves = named_leaves({**defaults_of(model.forward), **call})
    numbers = {argument: leaf for argument, leaf in leaves if isinstance(leaf, int | float)}
    for argument in names.values():
        if argument in numbers:
            values[argument] = numbers[argument]
    if not values.keys() >= set(names.values()):
        if len(inputs) != len(values):
            raise InputError(
                f"{name}: takes {len(inputs)} inputs, and the call has {len(values)} tensors"
            )
        names = dict(zip(names, values, strict=True))
    try:
        declared = {entry.name: entry for entry in inputs}
        arrays = {
            input_name: array_for(declared[input_name], values[argument])
            for input_name, argument in names.items()
        }
        feed = inputs.feed_again(arrays).arrays
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    # Copies, because a model may change its arguments in place.
    return {input_name: array.copy() for input_name, array in feed.items()}
