"""``quantize``: a precision for each module, computed by ONNX Runtime's quantizers or a plug-in."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.quantize.choosing import (
    AutoPrecision,
    PrecisionChoice,
    choose,
    listed,
    reasons_why_not,
)
from htp_export.capabilities.quantize.method import CHECKPOINT, Precision
from htp_export.capabilities.quantize.methods.checkpoint import LoadedWeights
from htp_export.capabilities.quantize.ort_quantizers import raised_by_tool, tool_error
from htp_export.capabilities.quantize.precisions import PRECISIONS, precisions_of
from htp_export.capabilities.quantize.quantized import (
    Check,
    Kept,
    Quantized,
    QuantizedModule,
    check_of,
)
from htp_export.capabilities.quantize.work import CalibrationData, Left, Validation, Work, named
from htp_export.editing.editing import raised
from htp_export.editing.flattening import read_flat
from htp_export.errors import HtpExportError, InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target, files_named_in
from htp_export.format import tags
from htp_export.lineage.settling import Bookkeeping
from htp_export.model.copies import Copied
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.reporting.columns import many
from htp_export.runtime.data import Data
from htp_export.runtime.faulty_optimizers import CRASHING, DISABLED, can_crash
from htp_export.runtime.processors import saturates
from htp_export.runtime.runner import Metric
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings
from htp_export.weights.state_entries import Weights

_log = logging.getLogger(__name__)

_RANDOM = "the ranges of activations are measured on random inputs: the accuracy of this model means nothing"
_CRASH = (
    "ONNX Runtime can crash on the CPU while it optimises this model: set the session configuration entry "
    f"{DISABLED} to {CRASHING}"
)


@names_model_faults("model")
def quantize(
    model: ModelSource,
    plan: Mapping[str, Any] | str = "auto",
    output: str | os.PathLike[str] | None = None,
    *,
    data: Data | None = None,
    metric: Metric | None = None,
    validation: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    dry_run: bool = False,
    check: bool = False,
    external_data: str | None = None,
    share_weights: bool = False,
    weights: Weights | None = None,
    strict: bool = False,
) -> Quantized:
    """Give modules other precisions, and keep the module tags.

    A rule applies to the regions of the modules that its selector matches; the last rule wins
    (``docs/plans.md``). Exactly the nodes of these regions change; all other nodes and their inputs
    stay the same. A node that cannot have its precision stays, too: ``kept`` of the result has the
    reason.

    Thread-safe, also for calls on the same model.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or
            ``ir.Model``; not changed.
        plan: Selector → precision, in order: ``int8``, ``u8s8``, ``uint8``, ``int16`` (QDQ,
            calibrated; ``u8s8`` is the fast one on x86), ``int8-dynamic``, ``int4``,
            ``int8-weights`` (weights in blocks), ``fp8``, ``fp16``, ``bf16``, ``fixed:8.4`` (fixed
            point), ``mxint8``, ``mxfp8``, ``mxfp6``, ``mxfp4`` (microscaling), ``fp32`` (as it is),
            ``auto`` (one that is usually faster than fp32 on this machine), a `Precision`, or a mapping
            with the name as ``precision`` and other fields. Or one of these for the whole model.
        output: The file to write.
        data: For precisions that are calibrated: input name → array, or an ``.npz`` file, for one
            run; several of these, of which one is in memory at a time; a folder of ``.npz`` files;
            or ``"package.module:factory"``, a function that returns such data. None for random
            inputs, with which accuracy means nothing.
        metric: For rules with ``max_drop``: your own measure, such as the accuracy. A function of
            the outputs of the whole model, name → array, for each of the runs; larger is better.
        validation: The runs on which ``metric`` is computed, as ``data``; None for ``data``.
        dims: Name of an open dimension → size. Random inputs have 1 without; ``data`` of other
            sizes are refused.
        shapes: For random inputs: input name → shape.
        seed: Seed of the random inputs.
        dry_run: Run nothing and write nothing: the result has the precision and the predicted bytes
            of each module.
        check: Run both models on the data (at most 4 runs): the result has the worst module, as
            `compare` finds it, and the time of a run of both, in turn.
        external_data: Name of a file beside ``output`` for all weights of more than 256 bytes.
        share_weights: Leave external weights in the data file of another model in the folder of
            ``output``, and write no copy. If that file changes, ``output`` cannot be read any more.
        weights: A checkpoint in any form that `bind` reads: its values replace those of the model.
            Of a quantized one (GPTQ, AWQ, ...), packed matrices stay packed: this precision is
            called ``checkpoint``, and without a plan, the whole model has it.
        strict: Raise an error if a node, or its bias, would stay as it is.

    Returns:
        The result by module: ``.modules[path].precision``, ``.bytes_before``, ``.bytes_after``.

    Raises:
        InputError: A rule matches no module, no operator of its modules takes the precision, the
            data do not fit, the metric falls by more than ``max_drop``, or with ``strict``, a node
            is kept.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: The quantizer of ONNX Runtime or of a plug-in fails, or ONNX Runtime cannot run
            its output.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 64),), verbose=False)
        >>> result = quantize(program, {"0": "int4"})
        >>> result.modules["0"].precision, result.modules["0"].bytes_before, result.modules["0"].bytes_after
        ('int4', 8320, 1440)
        >>> [(node.op_type, node.metadata_props["htp.module"]) for node in result.model.graph]
        [('MatMulNBits', '0'), ('Add', '0'), ('Relu', '1'), ('Gemm', '2')]
    """
    # The steps in their order: arguments, choice, data, application, checks, file. Each branch is
    # one option, and none is inside another.
    settings = RunSettings(data, dims, shapes, seed)
    check_target(output, reads=files_named_in([data, validation]))
    if dry_run and check:
        raise InputError("check runs the quantized model, and dry_run makes none: give one of them")
    request = _read_request(model, plan, weights)
    original, rules = request.tagged, request.rules
    if not dry_run:
        _check_metric(rules.values(), metric, validation)
        original.require_exact_tags()
    if request.weights is not None:
        # all parameters, not only the packed matrices: AWQ changes norms, too
        original = request.weights.loaded_into(original)
    auto = AutoPrecision(original, settings)
    choice = choose(original, auto.rules(rules))
    if strict:
        _refuse_unsuited(choice)
    notes = [*auto.notes, *_notes(choice)]
    if request.weights is not None:
        notes += request.weights.fitted.notes
    if dry_run:
        return _result(choice, choice.predicted(), notes)

    name = name_of(model, f"model {original.model.graph.name!r}")
    passes = (metric is not None) + check
    samples = _calibration_data(choice, settings, passes)
    if samples.random and choice.calibrated:
        _log.warning("no data: %s", _RANDOM)
        notes.insert(0, _RANDOM)
    control = None
    if metric is not None:
        control = _validation(metric, validation, samples, choice, name)

    changed, left = _changed(choice, samples, name, control)
    _check_left(choice, left, name, strict=strict)
    choice = choice.without(kept.node for kept in left if not kept.partly)
    metrics = _checked_metrics(choice, changed.model, control)
    modules = contents_of(changed.refresh()).modules
    sizes = {path: contents.facts.weight_bytes for path, contents in modules.items()}
    checked = check_of(original, changed, samples, sizes[""]) if check else None
    if output is not None:
        write_model(changed.model, output, external_data, share_weights=share_weights)
    notes += _notes_on_result(choice, left, changed.model)
    return _result(choice, sizes, notes, changed.model, metrics, checked, left)


def _calibration_data(
    choice: PrecisionChoice, settings: RunSettings, passes: int
) -> CalibrationData:
    """The runs on which ranges are measured.

    ``passes``: The number of further passes over the data.
    """
    readings = sum(precision.how.readings for precision in choice.nodes)
    return CalibrationData.of(settings, choice.tagged.model, passes=readings + passes)


def _validation(
    metric: Metric,
    validation: Data | None,
    samples: CalibrationData,
    choice: PrecisionChoice,
    name: str,
) -> Validation:
    """The user's metric on the validation data, or without them on the runs for ranges."""
    original = choice.tagged.model
    if validation is not None:
        settings = replace(samples.settings, data=validation, shapes=None)
        samples = CalibrationData.of(settings, original)
    return Validation(metric, samples, original, name)


@dataclass(frozen=True)
class _Request:
    """The arguments of `quantize` that were read: the model, its plan, and the checkpoint.

    Attributes:
        tagged: The model without functions, in an opset in which every precision of the plan can be
            written.
        rules: Selector → precision.
        weights: The entries of ``weights``; None without them.
    """

    tagged: TaggedModel
    rules: Mapping[str, Precision]
    weights: LoadedWeights | None


def _read_request(
    model: ModelSource,
    plan: Mapping[str, Any] | str,
    weights: Weights | None,
) -> _Request:
    loaded = None
    if weights is None:
        # first the plan: a fault in it is found without reading the model
        rules = precisions_of(plan)
        flat = read_flat(model)
    else:
        flat = read_flat(model)
        loaded = LoadedWeights.of(weights, flat)
        named = {**PRECISIONS, **loaded.precisions}
        rules = precisions_of(CHECKPOINT if plan == "auto" and loaded.packed else plan, named)
    opsets = [precision.how.first_opset for precision in rules.values()]
    return _Request(raised(flat, max(opsets, default=1)), rules, loaded)


def _refuse_unsuited(choice: PrecisionChoice) -> None:
    """Raise an `InputError` if nodes with weights cannot have the precision of the plan."""
    unsuited = _unsuited(choice)
    if unsuited:
        raise InputError(f"strict: {unsuited[0]}")


def _checked_metrics(
    choice: PrecisionChoice, model: ir.Model, control: Validation | None
) -> tuple[float | None, float | None]:
    """The metric before and after; an `InputError` if it fell by more than ``max_drop``."""
    if control is None:
        return None, None
    drops = [precision.max_drop for precision in choice.nodes]
    most_drop = max((drop for drop in drops if drop is not None), default=None)
    return control.before, control.check(model, most_drop)


def _check_metric(
    precisions: Iterable[Precision], metric: Metric | None, validation: object
) -> None:
    """Raise an `InputError` for a metric without a rule with ``max_drop``, and for the reverse."""
    controlled = [precision.name for precision in precisions if precision.max_drop is not None]
    if controlled and metric is None:
        raise InputError(
            f"precision {controlled[0]!r} has max_drop; give the metric that may fall by it"
        )
    if not controlled and (metric is not None or validation is not None):
        raise InputError(
            "a metric and validation data are for rules with max_drop, and the plan has none"
        )


def _changed(
    choice: PrecisionChoice, samples: Samples, name: str, control: Validation | None
) -> tuple[TaggedModel, list[Left]]:
    """A copy of the model with the precisions of a plan, and the nodes that were left unchanged.

    Precisions with ``max_drop`` are applied after the others of their method, so that the metric
    includes the effect of the others.
    """
    original = choice.tagged
    copied = Copied.of(original)
    changed, copy_of = copied.tagged, copied.copy_of
    planned = {copy_of[node]: precision for node, precision in choice.found.nodes.items()}
    # Before any method changes nodes: it records their order and signatures.
    changes = Bookkeeping(changed)
    work = Work(copied, original, choice.facts, planned, samples, name, control)
    nodes: dict[Precision, list[ir.Node]] = {}
    for precision in sorted(choice.nodes, key=_order):
        nodes[precision] = [copy_of[node] for node in choice.nodes[precision]]
    left = apply_precisions(nodes, work)
    changes.settle(planned)
    return changes.finish(), left


def apply_precisions(nodes: Mapping[Precision, Sequence[ir.Node]], work: Work) -> list[Left]:
    """Give nodes of the changed model their precisions, in place; return the nodes that are left."""
    left: list[Left] = []
    try:
        for precision, members in nodes.items():
            left += precision.how.apply(members, work)
    except HtpExportError:
        raise
    except Exception as error:
        if not raised_by_tool(error):
            raise
        raise tool_error(work.name, error) from error
    return left


def _check_left(choice: PrecisionChoice, left: Sequence[Left], name: str, *, strict: bool) -> None:
    """Raise an error if a tool failed on all nodes or, with ``strict``, if any is left."""
    failures = {kept.node: kept.failure for kept in left if kept.failure is not None}
    if failures and failures.keys() >= choice.precision_of.keys():
        node, failure = next(iter(failures.items()))
        raise tool_error(name, failure, f" ({named(node)})") from failure
    if strict and left:
        first = left[0]
        problem = first.why
        if not first.partly:
            problem = f"{named(first.node)} stays as it is: {first.why}"
        raise InputError(f"{choice.precision_of[first.node]}, strict: {problem}")


def _notes_on_result(choice: PrecisionChoice, left: Sequence[Left], changed: ir.Model) -> list[str]:
    """One sentence for each reason why nodes are left unchanged, and a warning of crashes."""
    notes = list(dict.fromkeys(kept.why for kept in left if kept.partly))
    whole = [kept for kept in left if not kept.partly]
    counts = Counter((kept.why, choice.facts.has_floats(kept.node)) for kept in whole)
    # Nodes that compute in other types do not stay "in fp32".
    for (why, is_float32), count in counts.items():
        verb = "stays" if count == 1 else "stay"
        state = "in fp32" if is_float32 else "as they are"
        notes.append(f"{many(count, 'node')} {verb} {state}: {why}")
    if can_crash(changed) and not can_crash(choice.tagged.model):
        notes.append(_CRASH)
    return notes


def _order(precision: Precision) -> tuple[int, float]:
    """The sort key of precisions: the method; then, those without ``max_drop`` come first."""
    drop = -1.0 if precision.max_drop is None else precision.max_drop
    return precision.how.order, drop


def _notes(choice: PrecisionChoice) -> list[str]:
    """Sentences on the effect of the plan, known before it is applied."""
    notes = []
    saturating = [precision.name for precision in choice.nodes if _sums_eight_bits(precision)]
    if saturating and saturates():
        notes.append(
            "this processor has no VNNI: ONNX Runtime's products of 8-bit integers saturate on it, and results can be "
            f"far off; write {saturating[0]}:reduce_range=true, or uint8, or auto, which chooses that"
        )
    if choice.found.disputed:
        count = len(choice.found.disputed)
        notes.append(
            f"nodes that stay as they are because their modules have different precisions: {count}"
        )
    for selector, nodes in choice.found.reached.items():
        if nodes and not choice.found.deciding[selector]:
            notes.append(
                f"rule {selector!r} decides nothing: later rules hold for all of its nodes"
            )
    return [*notes, *_unsuited(choice)]


def _sums_eight_bits(precision: Precision) -> bool:
    """Whether products add up full 8-bit weights, whose 16-bit sums overflow without VNNI."""
    is_full = precision.weight == "int8" and not precision.reduce_range
    return is_full and precision.how.multiplies_integers


def _unsuited(choice: PrecisionChoice) -> list[str]:
    """One sentence for each reason why nodes with weights cannot have the precision of the plan."""
    sentences: list[str] = []
    for precision, nodes in choice.left.items():
        reasons = listed(reasons_why_not(nodes, precision, choice.facts))
        sentences += [f"{precision.name} leaves {reason}" for reason in reasons]
    return sentences


def _result(
    choice: PrecisionChoice,
    bytes_after: Mapping[str, int],
    notes: Sequence[str],
    model: ir.Model | None = None,
    metrics: tuple[float | None, float | None] = (None, None),
    checked: Check | None = None,
    left: Sequence[Left] = (),
) -> Quantized:
    precisions = choice.precisions()
    modules: dict[str, QuantizedModule] = {}
    for path, contents in contents_of(choice.tagged).modules.items():
        modules[path] = QuantizedModule(
            **vars(choice.tagged.hierarchy[path]),
            precision=precisions[path] if contents.nodes else None,
            bytes_before=contents.facts.weight_bytes,
            bytes_after=bytes_after.get(path, 0),
            nodes=len(contents.nodes),
            changed=sum(node in choice.precision_of for node in contents.nodes),
        )
    kept = tuple(_kept(choice, unchanged) for unchanged in left)
    changed, others = choice.counted(choice.nodes), choice.counted(choice.left)
    return Quantized(
        modules, changed, others, tuple(notes), model is None, *metrics, checked, kept, given=model
    )


def _kept(choice: PrecisionChoice, left: Left) -> Kept:
    return Kept(
        node=left.node.name or "",
        operator=left.node.op_type,
        modules=tuple(tags.owners_of(left.node.metadata_props)),
        precision=choice.found.nodes[left.node].name,
        whole=not left.partly,
        reason=left.why,
    )
