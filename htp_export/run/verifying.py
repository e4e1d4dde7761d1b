"""``verify``: a PyTorch model against its ONNX file, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from htp_export.errors import InputError, UntaggedModelError
from htp_export.exporter.capture.calls import arguments_by_name, defaults_of, named_leaves
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.run.checking import check_calls
from htp_export.run.contradictions import with_contradictions
from htp_export.run.isolating import check_isolated
from htp_export.run.locating import blame_by_graph, blame_by_nesting, with_missing_outputs
from htp_export.run.pairing import input_arguments, pair_call, signature_of, unmatched_calls
from htp_export.run.parameters import known_parameters, misplaced_parameters
from htp_export.run.pytorch_calls import evaluating, record_calls, with_registered
from htp_export.run.readers import parameter_readers
from htp_export.run.reporting import module_results, tolerance_of
from htp_export.run.results import Verification
from htp_export.run.same_model import check_same_model, check_same_modules_ran
from htp_export.run.taken_branches import numbered_as_in_file, with_taken_branches
from htp_export.runtime.arrays import PORTION_BYTES, ArrayStore
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings

if TYPE_CHECKING:
    from torch import nn

__all__ = ["verify"]


@names_model_faults("onnx")
def verify(
    model: nn.Module,
    onnx: ModelSource,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    isolated: bool = False,
    select: str | Sequence[str] | None = None,
    tolerances: Mapping[str, tuple[float, float]] | None = None,
    portion_bytes: int = PORTION_BYTES,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
) -> Verification:
    """Compare a PyTorch model with its ONNX file, module by module.

    PyTorch runs once, in eval mode, with hooks on every module. ONNX Runtime runs the file without optimisation and
    returns the tensors that modules return. ``docs/verify.md`` describes how they are compared. The model is restored
    afterwards.

    Not thread-safe for one PyTorch model: it has hooks while it runs.

    Args:
        model: The PyTorch model.
        onnx: The exported model: a file, or a model in memory.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        isolated: Run the nodes of each module alone, on the inputs that PyTorch gave to the module, so that an error is
            reported for the module that causes it.
        select: Only these modules; see ``TaggedModel.select``.
        tolerances: Selector → absolute and relative tolerance of the outputs of these modules; the last selector that
            matches applies.
        portion_bytes: Bytes of tensors that are fetched in one run, and of PyTorch's tensors that stay in memory; the
            rest goes into temporary files.
        providers: ONNX Runtime's execution providers, in order of preference.
        session_options: An ``onnxruntime.SessionOptions``: threads, custom operators and so on. Optimisation is off
            whatever it says; it is restored afterwards.

    Returns:
        The result for every module: ``.ok``, ``.first_wrong``, ``.modules[path].max_abs``, ``.modules[path].status``.

    Raises:
        InputError: The file is of another model, the model or the file cannot run on these arguments, or a selector
            matches nothing.
        FileError: The file cannot be read.
        UntaggedModelError: The file has no module tags.

    Examples:
        >>> import torch, htp_export
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), torch.randn(2, 4)
        >>> program = htp_export.export(net, (x,), verbose=False)
        >>> result = htp_export.verify(net, program, (x,))
        >>> result.ok, result.first_wrong, result.modules["0"].status
        (True, None, 'agrees')
    """
    kwargs = dict(kwargs or {})
    tagged, name = read_flat(onnx), name_of(onnx, "the ONNX model")
    if tagged.source == "none" and not tagged.signatures:
        raise UntaggedModelError(f"{name}: has no module tags; export it with htp_export.export(...)")
    exact = tagged.source != "torch"  # torch's own scopes name modules wrongly
    allowed = tolerance_of(tagged, tolerances or {})
    chosen = set(tagged.paths if select is None else tagged.select(select))
    check_same_model(tagged, model, name)
    feed = feed_of_call(tagged, model, args, kwargs, name)
    settings = SessionSettings(tuple(providers), session_options)
    with ArrayStore.opened(portion_bytes) as store:

        def wanted(path: str, number: int, argument: str) -> bool:
            signature = signature_of(tagged, path, number)
            return path in chosen and signature is not None and signature.inputs.get(argument) is not None

        with evaluating(model), parameter_readers(model) as readers:
            calls = record_calls(model, args, kwargs, store, wanted)
        ran = Counter(call.path for call in calls)
        if exact:
            check_same_modules_ran(tagged, model, ran, name)
        taken = with_taken_branches(tagged, feed, name, settings)
        calls, there = numbered_as_in_file(tagged, taken, calls)
        unmatched = unmatched_calls(tagged, ran, there)
        chosen_calls = [call for call in calls if call.path in chosen and call.path not in unmatched]
        runner = Runner(taken.model, name, settings)
        if isolated:
            checked, reasons = check_isolated(
                taken, chosen_calls, feed, runner, settings, store, portion_bytes, allowed
            )
            blame = blame_by_nesting(checked)
        else:
            paired = [pair_call(taken, call) for call in chosen_calls if call.path in taken]
            checked, reasons = check_calls(taken, paired, feed, runner, portion_bytes, allowed), {}
            blame = blame_by_graph(taken, checked)
    blame = with_contradictions(tagged, with_missing_outputs(tagged, blame, calls[-1]), chosen)
    known = known_parameters(tagged, model) if exact else {}
    modules = module_results(tagged, chosen, checked, blame, {**reasons, **unmatched}, isolated=isolated)
    return Verification(
        modules=modules,
        wrong=tuple(path for path in blame.modules if path in modules),
        isolated=isolated,
        tags=(tagged.tag_facts,),
        parameters=len(known),
        misplaced=misplaced_parameters(tagged, known, readers, model),
    )


def feed_of_call(
    tagged: TaggedModel, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> dict[str, npt.NDArray[Any]]:
    """The arguments of a call of the model, as inputs of the file.

    The file says which input is which argument; where it does not, their names do, or else their order. A number is
    an input where the exporter made it one (TorchScript's), also one that is a default of ``forward``.

    Args:
        tagged: The file.
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        name: What to call the file in errors.

    Raises:
        InputError: If the call has not the inputs that the file takes, or they have other types or shapes.
    """
    import torch

    inputs = Inputs.of(tagged.model)
    call = arguments_by_name(model.forward, tuple(args), kwargs)
    values: dict[str, Any] = dict(with_registered(named_leaves(call)))
    values = {argument: leaf for argument, leaf in values.items() if isinstance(leaf, torch.Tensor)}
    names = input_arguments(tagged)
    numbers = {name: leaf for name, leaf in named_leaves({**defaults_of(model.forward), **call}) if _is_number(leaf)}
    values.update((argument, numbers[argument]) for argument in names.values() if argument in numbers)
    if not all(argument in values for argument in names.values()):
        if len(inputs) != len(values):
            raise InputError(f"{name}: takes {len(inputs)} inputs, and the call has {len(values)} tensors")
        names = dict(zip(names, values, strict=True))
    try:
        return dict(inputs.feed({key: values[argument] for key, argument in names.items()}).arrays)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
