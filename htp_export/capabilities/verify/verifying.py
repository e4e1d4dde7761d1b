"""``verify``: a PyTorch model against its ONNX file, module by module."""

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
    module_results,
    tolerance_of,
    with_contradictions,
    with_missing_outputs,
)
from htp_export.capabilities.verify.pytorch_run import evaluating, parameter_readers, record_calls
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
from htp_export.runtime.sessions import SessionSettings

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

    What `htp_export.export` returned knows its model and example inputs while they are alive:
    ``verify(program)``. Without arguments, a file that this process exported from the model is
    verified with those of its export.

    Not thread-safe for one PyTorch model: it has hooks while it runs.

    Args:
        model: The PyTorch model; or what `htp_export.export` returned for it, alone.
        onnx: The exported model: a file, or a model in memory.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        isolated: Run the nodes of each module alone, on the inputs that PyTorch gave to the module,
            so that an error is reported for the module that causes it.
        outputs_from: Tensors of the file that another engine computed on the same arguments: an
            ``.npz`` file, or name → array. ONNX Runtime is not run; modules without a tensor there
            are not compared, and the result's ``next_outputs`` names the tensor that halves what
            may be wrong.
        select: Only these modules; see ``TaggedModel.select``.
        tolerances: Selector → absolute and relative tolerance of the outputs of these modules; the
            last selector that matches applies.
        portion_bytes: Bytes of tensors that are fetched in one run, and of PyTorch's tensors that
            stay in memory; the rest goes into temporary files.
        providers: ONNX Runtime's execution providers, in order of preference.
        session_options: An ``onnxruntime.SessionOptions``: threads, custom operators and so on.
            Optimisation is off whatever it says; it is restored afterwards.

    Returns:
        The result for every module: ``.ok``, ``.first_wrong``, ``.modules[path].max_abs``,
        ``.modules[path].status``.

    Raises:
        InputError: The file is of another model, the model or the file cannot run on these
            arguments, a selector matches nothing, the model or the inputs that an export was made
            of are gone, or ``outputs_from`` has none of its tensors, or was made of other inputs.
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
    if isolated and outputs_from is not None:
        raise InputError(
            "isolated runs parts of the file, and outputs_from has what was computed: give one of them"
        )
    model, onnx, args, kwargs = _what_was_exported(model, onnx, args, kwargs)
    # a model adds to its cache: `record_calls` copies what torch takes apart
    prepare_caches(args, kwargs, None)
    tagged, name = read_flat(onnx), name_of(onnx, "the ONNX model")
    check_has_modules(tagged, name)
    chosen = set(tagged.paths if select is None else tagged.select(select))
    with attention_as_in(tagged.hierarchy, model):
        check_same_model(tagged, model, name)
        feed = feed_of_call(tagged, model, args, kwargs, name)
        run = FileRun(
            tagged, name, feed, SessionSettings(tuple(providers), session_options), portion_bytes
        )
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


def _what_was_exported(
    model: nn.Module | torch.onnx.ONNXProgram,
    onnx: ModelSource | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> tuple[nn.Module, ModelSource, Sequence[Any], dict[str, Any]]:
    """The model, its file and a call of it; what was not given is what an export of this process was made of."""
    from torch.onnx import ONNXProgram

    known = None
    if isinstance(model, ONNXProgram):
        if onnx is not None:
            raise InputError(
                "a program knows the model that it was made of: give verify(program), or that model"
            )
        onnx = model
        model, known = model_and_call(onnx)
    elif onnx is None:
        raise InputError("verify takes a model and its file, or what htp_export.export returned")
    elif not args and not kwargs:
        known = call_of(model, onnx)
    if args or kwargs or known is None:
        return model, onnx, args, dict(kwargs or {})
    return model, onnx, known[0], known[1]


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
    """The result for the chosen modules; the model has the modules of the file."""
    tagged, name = run.tagged, run.name
    exact = tagged.source != "torch"  # torch's own scopes name modules wrongly

    def wanted(path: str, number: int, argument: str) -> bool:
        signature = tagged.signature(path, number)
        return (
            path in chosen and signature is not None and signature.inputs.get(argument) is not None
        )

    with ArrayStore.opened(run.portion_bytes) as store:
        # what changes while it waits for others stays
        with evaluating(model), unchanged(model, (args, kwargs)):
            with parameter_readers(model) as readers:
                calls = record_calls(model, args, kwargs, store, wanted)
            ran = Counter(call.path for call in calls)
            if exact:  # with the modules that there were in the run
                check_same_modules_ran(tagged, model, ran, name)
        taken = run if isinstance(run, DumpedRun) else with_taken_branches(run)
        calls, calls_taken = numbered_as_in_file(tagged, taken.tagged, calls)
        unmatched = unmatched_calls(tagged, ran, calls_taken)
        compared = [call for call in calls if call.path in chosen and call.path not in unmatched]
        unmatched |= dict.fromkeys(
            (call.path for call in compared if None in call.outputs), _NO_VALUES
        )
        checked, blame, reasons, following = check_run(
            taken, compared, store, allowed, isolated=isolated
        )
    blame = with_contradictions(tagged, with_missing_outputs(tagged, blame, calls[-1]), chosen)
    known = known_parameters(tagged, model) if exact else {}
    drawing = {call.path for call in calls if call.draws}
    training = training_nodes(tagged, blame.modules, drawing) if blame.modules else ()
    modules = module_results(
        tagged, chosen, checked, blame, {**reasons, **unmatched}, isolated=isolated
    )
    return Verification(
        modules=modules,
        wrong=tuple(path for path in blame.modules if path in modules),
        isolated=isolated,
        next_outputs=following,
        tags=(tagged.tag_facts,),
        parameters=len(known),
        misplaced=misplaced_parameters(tagged, known, readers, model),
        training=training,
    )


_NO_VALUES = "some of its tensors have no values of their own in PyTorch: torch.vmap runs it, or they are sparse"


def feed_of_call(
    tagged: TaggedModel, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the arguments of a call of the model as inputs of the file; what does not fit is an `InputError`.

    They are matched by the signature in the file, otherwise by name, otherwise in order. A number,
    also a default of ``forward``, is an input if the exporter made it one, as TorchScript's does.
    """
    inputs = Inputs.of(tagged.model)
    call = arguments_by_name(model.forward, tuple(args), kwargs)
    values: dict[str, Any] = dict(named_tensors_in(call))
    names = input_arguments(tagged)
    leaves = named_leaves({**defaults_of(model.forward), **call})
    numbers = {name: leaf for name, leaf in leaves if isinstance(leaf, int | float)}
    values.update(
        (argument, numbers[argument]) for argument in names.values() if argument in numbers
    )
    if not all(argument in values for argument in names.values()):
        if len(inputs) != len(values):
            raise InputError(
                f"{name}: takes {len(inputs)} inputs, and the call has {len(values)} tensors"
            )
        names = dict(zip(names, values, strict=True))
    try:
        wanted = {each.name: each for each in inputs}
        given = {key: array_for(wanted[key], values[argument]) for key, argument in names.items()}
        fed = inputs.feed_again(given).arrays
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    # a model may change its arguments in place
    return {key: array.copy() for key, array in fed.items()}
