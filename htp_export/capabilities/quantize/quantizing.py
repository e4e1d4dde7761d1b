"""quantize(): a precision for each module, with the numerics of ONNX Runtime's quantizers."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.quantize.blocks import groups_of, quantize_blocks
from htp_export.capabilities.quantize.calibration_data import Data, Samples, activations, samples_of
from htp_export.capabilities.quantize.casting import cast_nodes
from htp_export.capabilities.quantize.choosing import PrecisionChoice, choose
from htp_export.capabilities.quantize.integers import Calibrator, quantize_at_run_time, weights_of
from htp_export.capabilities.quantize.nncf_engine import quantize_with_nncf
from htp_export.capabilities.quantize.nncf_weights import compress_with_nncf, scaled_before
from htp_export.capabilities.quantize.precisions import Engine, Method, Precision, precisions_of
from htp_export.capabilities.quantize.quantized import Quantized, QuantizedModule
from htp_export.capabilities.quantize.validation import Validation, check_metric
from htp_export.editing.flattening import read_flat
from htp_export.editing.submodels import Submodel, constant_of, cut_out, put_back, remove_unused
from htp_export.errors import HtpExportError, InputError, ToolError, described
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target, files_named_in
from htp_export.format import tags
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import contents_of
from htp_export.model.regions import twins_of
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.model.tensor_names import Names
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.crashes import AT_FAULT, DISABLED, can_crash
from htp_export.runtime.metrics import Metric

__all__ = ["quantize"]

_log = logging.getLogger(__name__)

_RANDOM = "the ranges of activations are those of random inputs: the accuracy of this model means nothing"
_CRASH = (
    "ONNX Runtime can crash on the CPU while it optimises this model: set the session configuration entry "
    f"{DISABLED} to {AT_FAULT}"
)


@names_model_faults("model")
def quantize(
    model: ModelSource,
    plan: Mapping[str, Any] | str,
    output: str | os.PathLike[str] | None = None,
    *,
    data: Data | None = None,
    metric: Metric | None = None,
    validation: Data | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    dry_run: bool = False,
    external_data: str | None = None,
    share_weights: bool = False,
) -> Quantized:
    """Give modules other precisions, and keep the module tags.

    A rule holds for the regions of the modules that its selector names: for all modules below them, and for those that
    they call, unless a rule names these by their own path. The last rule holds. A Conv and the BatchNorm that is merged
    into it are one decision, that of the Conv; other nodes of several modules change only if all of these agree.
    Exactly the nodes of these regions change. All others, and the weights and tensors that they read, stay as they are.

    Thread-safe, also for calls on the same model.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        plan: Selector → precision, in order: ``int8``, ``u8s8``, ``uint8``, ``int16`` (QDQ, calibrated; ``u8s8`` is
            the fast one on x86), ``int8-dynamic``, ``int4``, ``int8-weights`` (weights in blocks), ``fp16``, ``bf16``,
            ``fp32`` (as it is), a `Precision`, or a mapping with the name as ``precision`` and other fields of it. Or a
            preset: ``int8``, ``w4``, ``fp16``.
        output: The file to write.
        data: For precisions that are calibrated: input name → array, or an ``.npz`` file, for one run; or several of
            these, of which one is in memory at a time. None for random inputs, with which accuracy means nothing.
        metric: For rules with ``max_drop``: a number of your own, as the accuracy: called with the outputs of the whole
            model, name → array, for each of the runs; larger is better.
        validation: The runs that ``metric`` is computed on, as ``data``; None for ``data``.
        dims: Name of an open dimension → size, for random inputs.
        seed: Seed of the random inputs.
        dry_run: Run nothing and write nothing: the result has the precision and the predicted bytes of each module.
        external_data: Name of a file beside ``output`` for all weights of more than 256 bytes.
        share_weights: Leave external weights in the data file of another model in the folder of ``output``, and write
            no copy. If that file changes, ``output`` cannot be read any more.

    Returns:
        What became of each module: ``.modules[path].precision``, ``.bytes_before``, ``.bytes_after``.

    Raises:
        InputError: A rule matches no module, no operator of its modules takes the precision, the data do not fit, or
            the metric falls by more than ``max_drop``.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: ONNX Runtime's quantizer or NNCF fails, or ONNX Runtime cannot run what NNCF made.

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
    from htp_export.capabilities.carry.carrying import carry_in_place

    check_target(output, reads=files_named_in([data, validation]))
    rules = precisions_of(plan)
    if not dry_run:
        check_metric(list(rules.values()), metric, validation)
    original = read_flat(model)
    if not dry_run:
        original.require_exact_tags()
    choice = choose(original, rules)
    if dry_run:
        return _result(original, choice, choice.predicted(), None, _notes(choice, random=False))
    passes = len(choice.calibrated) + (metric is not None) + any(map(_is_by_nncf, choice.nodes))
    samples = samples_of(data, original.model, dims, seed, passes=passes)
    random = bool(choice.calibrated) and samples.random
    if random:
        _log.warning("no data: %s", _RANDOM)
    changed = original.clone()
    twin = twins_of(original.model, changed.model)
    work = _Work(
        original,
        changed,
        {precision: [twin[node] for node in nodes] for precision, nodes in choice.nodes.items()},
        {twin[node]: precision for node, precision in choice.found.nodes.items()},
    )
    name = name_of(model, f"model {original.model.graph.name!r}")
    control = None
    if metric is not None:
        held_out = samples if validation is None else samples_of(validation, original.model, dims, seed)
        control = Validation(metric, held_out, original.model, name)
    try:
        stayed = work.run({twin[node]: ports for node, ports in choice.ports.items()}, samples, name, control)
    except HtpExportError:
        raise
    except Exception as error:
        if not _is_raised_by(error, "onnxruntime"):
            raise
        problem = f"failed on {name}: {described(error)}"
        raise ToolError("onnxruntime.quantization", problem) from error
    carry_in_place(original, changed.model)
    for node, same in twin.items():
        if node not in choice.precision_of:  # nothing happened to it
            same.metadata_props.clear()
            same.metadata_props.update(node.metadata_props)
    metrics = None if control is None else (control.before, control.check(changed.model, _most_drop(choice)))
    sizes = {path: contents.facts.weight_bytes for path, contents in contents_of(changed.refresh()).modules.items()}
    if output is not None:
        write_model(changed.model, output, external_data, share_weights=share_weights)
    notes = [*_notes(choice, random=random), *stayed]
    if can_crash(changed.model) and not can_crash(original.model):
        notes.append(_CRASH)
    return _result(original, choice, sizes, changed.model, notes, metrics)


def _is_raised_by(error: Exception, package: str) -> bool:
    """Whether an error comes from code that a package called, or from the package itself."""
    return any(package in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))


class _Work:
    """The precisions of a plan, applied in turn; ranges are measured on the model as it was."""

    def __init__(
        self,
        original: TaggedModel,
        changed: TaggedModel,
        nodes: Mapping[Precision, Sequence[ir.Node]],
        planned: Mapping[ir.Node, Precision],
    ) -> None:
        self._original, self._model, self._nodes, self._planned = original.model, changed.model, nodes, planned
        self._types = changed.inferred
        self._names = Names(self._model)

    def run(self, ports: Mapping[ir.Node, Any], samples: Samples, name: str, control: Validation | None) -> list[str]:
        """Apply all precisions, those that a metric controls after the other static ones.

        Returns:
            Sentences on nodes that stay as they are.
        """
        stayed: list[str] = []
        order = (Method.STATIC, Method.WEIGHTS, Method.DYNAMIC, Method.CAST)
        for method in order:
            chosen = [precision for precision in self._nodes if precision.method == method]
            for precision in sorted(
                chosen, key=lambda precision: -1.0 if precision.max_drop is None else precision.max_drop
            ):
                nodes = self._nodes[precision]
                if method != Method.CAST:
                    _refuse_nan(nodes, precision)
                if method == Method.STATIC:
                    stayed += self._static(nodes, precision, samples, name, control)
                elif method == Method.WEIGHTS and precision.engine == Engine.NNCF:
                    stayed += self._weights_by_nncf(nodes, precision, samples, name)
                elif method == Method.CAST:
                    cast = {node: ports[node] for node in nodes}
                    within = {node for node, planned in self._planned.items() if planned == precision}
                    remove_unused(cast_nodes(self._model, cast, precision, self._names, within))
                else:
                    self._weights(nodes, precision, samples, name)
        return stayed

    def _static(
        self,
        nodes: Sequence[ir.Node],
        precision: Precision,
        samples: Samples,
        name: str,
        control: Validation | None,
    ) -> list[str]:
        part = cut_out(self._model, nodes, self._types)
        if _is_by_nncf(precision):
            return self._by_nncf(part, precision, samples, name, control)
        with tempfile.TemporaryDirectory(prefix="htp_export_", ignore_cleanup_errors=True) as folder:
            calibrator = Calibrator(part, precision, Path(folder))
            with activations(self._original, name, samples, list(part.inputs)) as runs:
                for arrays in runs:
                    calibrator.add(arrays)
            made, left = calibrator.quantized()
        self._replace(part, made)
        if not left:
            return []
        tensors = sorted(set(left.values()))
        listed = ", ".join(tensors[:3]) + (", ..." if len(tensors) > 3 else "")
        return [
            f"{len(left)} nodes stay in fp32: values of {listed} fill masks and cannot be divided into the steps of "
            f"{precision.name}"
        ]

    def _by_nncf(
        self, part: Submodel, precision: Precision, samples: Samples, name: str, control: Validation | None
    ) -> list[str]:
        runs = self._inputs(part, precision, samples, name)
        if control is None or precision.max_drop is None:
            made, left = quantize_with_nncf(part, precision, runs)
        else:
            allowed = replace(precision, max_drop=control.budget(self._model, precision))
            made, left = quantize_with_nncf(part, allowed, runs, partial(control.with_part, self._model, part))
        self._replace(part, made)
        if not left:
            return []
        causes = "NNCF leaves them, or values that they read or make fill masks and cannot be divided into the steps of"
        back = "" if precision.max_drop is None else ", or the metric would fall by more than max_drop"
        return [f"{len(left)} nodes stay in fp32: {causes} {precision.name}{back}"]

    def _weights_by_nncf(
        self, nodes: Sequence[ir.Node], precision: Precision, samples: Samples, name: str
    ) -> list[str]:
        shown = scaled_before(nodes, self._planned, precision) if precision.awq else nodes
        part = cut_out(self._model, shown, self._types)
        made, left = compress_with_nncf(part, precision, self._inputs(part, precision, samples, name))
        self._replace(part, made)
        return [f"{len(left)} nodes stay in fp32: NNCF leaves them"] if left else []

    def _weights(self, nodes: Sequence[ir.Node], precision: Precision, samples: Samples, name: str) -> None:
        apart: dict[Any, list[ir.Node]] = {}
        for node in nodes:
            apart.setdefault((node.graph, node.op_type == "Conv"), []).append(node)  # convolutions have other weights
        groups = [group for alike in apart.values() for group in groups_of(alike, weights_of)]
        for group in counted(groups, "groups of weights"):
            part = cut_out(self._model, group, self._types)
            if precision.method == Method.DYNAMIC:
                made = quantize_at_run_time(part, precision)
            else:
                made = quantize_blocks(part, precision, self._inputs(part, precision, samples, name))
            self._replace(part, made)

    def _inputs(self, part: Submodel, precision: Precision, samples: Samples, name: str) -> list[Mapping[str, Array]]:
        """The inputs of a part in all runs; in the first one if only the result of a tool is to be run."""
        if not precision.calibrated and not _is_by_nncf(precision):
            return []
        with activations(self._original, name, samples, list(part.inputs)) as runs:
            return list(runs if precision.calibrated else islice(runs, 1))

    def _replace(self, part: Submodel, made: ir.Model) -> None:
        put_back(self._model, part, made, self._names)
        remove_unused(part.weights.values())


def _refuse_nan(nodes: Sequence[ir.Node], precision: Precision) -> None:
    """Refuse weights with NaN, which integers do not have."""
    for node in nodes:
        for value in node.inputs:
            tensor = constant_of(value)
            if tensor is not None and value is not None and nan_in({str(value.name): tensor.numpy()}):
                path = next(iter(tags.owners_of(node.metadata_props)), "")
                raise InputError(
                    f"{value.name!r} of module {path or '(root)'!r} has NaN, which {precision.name} has not"
                )


def _is_by_nncf(precision: Precision) -> bool:
    return precision.engine == Engine.NNCF


def _most_drop(choice: PrecisionChoice) -> float:
    """The most by which the metric may fall with the whole plan."""
    return max((each.max_drop for each in choice.nodes if each.max_drop is not None), default=math.inf)


def _notes(choice: PrecisionChoice, *, random: bool) -> tuple[str, ...]:
    from htp_export.capabilities.carry.adapters.quantizers import saturates

    notes = [_RANDOM] if random else []
    eight = [precision for precision in choice.nodes if precision.weight == "int8" and not precision.reduce_range]
    if any(precision.method in (Method.STATIC, Method.DYNAMIC) for precision in eight) and saturates():
        notes.append(
            "this processor has no VNNI: ONNX Runtime's products of 8-bit integers saturate on it, and results can be "
            "far off; quantize with reduce_range, or in uint8"
        )
    if choice.found.disputed:
        count = len(choice.found.disputed)
        notes.append(f"nodes that stay as they are because their modules have different precisions: {count}")
    return tuple(notes)


def _result(
    original: TaggedModel,
    choice: PrecisionChoice,
    after: Mapping[str, int],
    model: ir.Model | None,
    notes: Sequence[str],
    metrics: tuple[float, float] | None = None,
) -> Quantized:
    words = choice.precisions()
    changed = choice.precision_of
    modules = {
        path: QuantizedModule(
            **vars(original.hierarchy[path]),
            precision=words[path],
            bytes_before=contents.facts.weight_bytes,
            bytes_after=after.get(path, 0),
            nodes=len(contents.nodes),
            changed=sum(node in changed for node in contents.nodes),
        )
        for path, contents in contents_of(original).modules.items()
    }
    return Quantized(
        modules,
        choice.counted(choice.nodes),
        choice.counted(choice.left),
        tuple(notes),
        dry=model is None,
        metric_before=None if metrics is None else metrics[0],
        metric_after=None if metrics is None else metrics[1],
        given=model,
    )
