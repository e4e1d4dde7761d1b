"""`export` and `tagging`: ``torch.onnx.export`` with module tags, as a sequence of steps."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.onnx import OperatorExportTypes, TrainingMode

from htp_export.discovery import provider
from htp_export.errors import CaptureError, InputError, TorchChangedError
from htp_export.exporter.capture import patches, running, torch_internals
from htp_export.exporter.capture.patching import Patches
from htp_export.exporter.capture.running import export_untagged, seam
from htp_export.exporter.capture.saving import check_writable
from htp_export.exporter.capture_session import Dynamo, Program, Rewriting, TorchScript
from htp_export.exporter.export_arguments import (
    ModulesAsFunctions,
    Run,
    advice_on_caches,
    check_opset,
    other_opset,
    prepare_caches,
    refuse_caches,
)
from htp_export.exporter.export_cache import remember
from htp_export.exporter.quiet import hide_messages, show_tree_in_notebooks
from htp_export.files.write_file import work_folder
from htp_export.process.restoring import Changes, set_variable

if TYPE_CHECKING:
    from htp_export.exporter.after_export import AfterExport


def export(
    model: torch.nn.Module
    | torch.export.ExportedProgram
    | torch.jit.ScriptModule
    | torch.jit.ScriptFunction[Any, Any],
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    verbose: bool | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    dynamo: bool = True,
    external_data: bool = True,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    custom_translation_table: dict[Callable[..., Any], Callable[..., Any]] | None = None,
    report: bool = False,
    optimize: bool = True,
    verify: bool = False,
    profile: bool = False,
    dump_exported_program: bool = False,
    artifacts_dir: str | os.PathLike[str] = ".",
    export_params: bool = True,
    keep_initializers_as_inputs: bool = False,
    dynamic_axes: Mapping[str, Mapping[int, str]] | Mapping[str, Sequence[int]] | None = None,
    training: TrainingMode = TrainingMode.EVAL,
    operator_export_type: OperatorExportTypes = OperatorExportTypes.ONNX,
    do_constant_folding: bool = True,
    custom_opsets: Mapping[str, int] | None = None,
    export_modules_as_functions: ModulesAsFunctions = False,
    autograd_inlining: bool = True,
    names: str | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> torch.onnx.ONNXProgram | None:
    """Export a model to ONNX, and tag every node with the modules that compute it.

    Every parameter has the meaning, the default and the position that it has in
    ``torch.onnx.export``, and the graph is the same; with ``export_modules_as_functions``, which
    torch ignores under ``dynamo=True``, modules are functions. torch has no parameters ``names``
    and ``weights``. ``docs/format.md`` describes the tags.

    With ``dynamo=False``, the model is called as torch calls it. If that fails or changes the
    result, it is called with the arguments as you passed them: ``docs/export.md``.

    Thread-safe: exports of several threads run one after the other. No other thread may use the
    model meanwhile.

    Args:
        model: The model. An ``nn.Module`` keeps its whole module tree; an ``ExportedProgram`` the
            modules in its graph; a ``ScriptModule`` the modules of its inlined methods.
        args: Example positional inputs.
        f: The file to write; None to only return the model (``dynamo=True``).
        kwargs: Example keyword inputs.
        verbose: Whether torch prints its progress; without it, nothing is printed. All parameters
            that follow are as for ``torch.onnx.export``.
        input_names: Names for the graph's inputs. With ``dynamo=False``, keyword inputs are in the
            order of ``forward``'s signature if you pass names, as in torch, and otherwise in the
            order in which you pass them.
        output_names: Names for the graph's outputs.
        opset_version: ONNX opset to target. If torch writes another one, because it cannot convert
            the model, a `UserWarning` names both.
        dynamo: Whether to export with ``torch.export``; otherwise with TorchScript.
        external_data: Whether to write weights into a separate file (``dynamo=True``).
        dynamic_shapes: Dynamic dimensions (``dynamo=True``). A key-value cache of transformers may
            have one entry for all of its tensors; see ``docs/export.md``.
        custom_translation_table: Translations of your own operators (``dynamo=True``).
        report: Whether to write a report (``dynamo=True``).
        optimize: Whether to optimise the graph (``dynamo=True``).
        verify: Whether to run the model in ONNX Runtime (``dynamo=True``).
        profile: Whether to profile the export (``dynamo=True``).
        dump_exported_program: Whether to save the ``ExportedProgram`` (``dynamo=True``).
        artifacts_dir: The folder for reports.
        export_params: Whether to write weights.
        keep_initializers_as_inputs: Whether weights are graph inputs, too.
        dynamic_axes: Dynamic dimensions (``dynamo=False``).
        training: Deprecated by torch.
        operator_export_type: Deprecated by torch.
        do_constant_folding: Deprecated by torch.
        custom_opsets: Deprecated by torch.
        export_modules_as_functions: The modules that become ONNX functions, as with `functions`:
            True for every one, classes of modules, or a selector, see ``TaggedModel.select``.
        autograd_inlining: Deprecated by torch.
        names: ``"path"`` for names of nodes and tensors that begin with module paths, as with
            `rename`; None for torch's names.
        weights: A checkpoint in safetensors files, whose weights the file has in place of those of
            ``model``: parameters refer to these files, which are linked into the folder of ``f``, or
            copied. What else the file stores is in its data file. See ``docs/bind.md``.

    Returns:
        The ``ONNXProgram`` with ``dynamo=True``, None with ``dynamo=False``. While the model and
        the inputs are alive, ``htp_export.verify(program)`` and ``htp_export.verify(model, f)``
        need no inputs.

    Raises:
        OSError: The file cannot be written in its folder; raised before the model runs.
        Exception: Errors of ``torch.onnx.export``, with notes that name the module, the line of the
            model, a remedy and the next step. No file is written.
        InputError: Nothing is exported if torch's exporter cannot write ``opset_version``; if it
            does not accept key-value caches, or ``f`` is missing (``dynamo=False``); if
            ``export_modules_as_functions`` selects no module; if the style ``names`` is unknown. No
            file is written if none of the selected modules can be a function, or if ``weights`` do
            not fit the model.
        CaptureError: htp_export failed to capture the export, an error of its own. Inside `tagging`
            with ``strict=False``, the model is exported without tags instead.
        TorchChangedError: The installed torch lacks a part that htp_export needs.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = export(net, (torch.randn(2, 4),), verbose=False)
        >>> [(node.op_type, node.metadata_props["htp.module"]) for node in program.model.graph]
        [('Gemm', '0'), ('Relu', '1')]
    """
    options = {
        name: value
        for name, value in locals().items()
        if name not in ("model", "args", "f", "names", "weights")
    }
    if isinstance(f, str | os.PathLike):
        check_writable(f)
    uses_dynamo = dynamo is True or isinstance(model, torch_internals.exported_by_dynamo_alone())
    check_opset(opset_version, dynamo=uses_dynamo)
    entry = patches.DYNAMO_ENTRY if uses_dynamo else patches.TORCHSCRIPT_ENTRY
    positional = args if isinstance(args, tuple | list) else (args,)
    if uses_dynamo:
        options["dynamic_shapes"] = prepare_caches(positional, kwargs or {}, dynamic_shapes)
    elif f is None:
        raise InputError(
            "dynamo=False: the TorchScript exporter returns no model; give f, the file to write"
        )
    else:
        refuse_caches(positional, kwargs or {})
    shared = None if weights is None else _SharedWeights.of(weights, f, dynamo=uses_dynamo)
    exporter = running.wanted() or _Exporter()
    run: Run = torch.onnx.export
    options["verbose"] = bool(verbose)  # torch's None prints a line for each step
    options["export_modules_as_functions"] = False  # a step afterwards, for both exporters
    if names is not None or export_modules_as_functions:
        from htp_export.exporter.after_export import around

        for step in _steps_after(model, names, export_modules_as_functions):
            exporter, run = around(step, exporter, run, dynamo=uses_dynamo)

    def tagged(changes: Changes) -> torch.onnx.ONNXProgram | None:
        hide_messages(changes)
        _watch(changes, entry, exporter)
        if uses_dynamo and running.hurries.get():
            patches.FASTER_START.hold(changes)
        set_variable(changes, running.exporter, exporter)
        with advice_on_caches(positional, kwargs or {}):
            if shared is None:
                return run(model, args, f, **options)
            return shared.written(lambda file: run(model, args, file, **options))

    # All of it alone, not only the trace: torch first reads its translations, which parses sources,
    # and CPython 3.11's parser sometimes fails if two threads do that ("AST constructor recursion
    # depth mismatch").
    program = running.alone(tagged)
    if program is not None:  # the TorchScript exporter writes the requested opset, or fails
        message = other_opset(opset_version, program.model.opset_imports.get(""))
        if message is not None:
            warnings.warn(f"{message}; torch's log says why", stacklevel=2)
        show_tree_in_notebooks(program)
    remember(model, args, kwargs, f, program)
    return program


@dataclass(frozen=True)
class _SharedWeights:
    """A file to write that refers to a checkpoint for its weights."""

    weights: str | os.PathLike[str]
    file: Path
    dynamo: bool

    @classmethod
    def of(cls, weights: str | os.PathLike[str], f: Any, *, dynamo: bool) -> _SharedWeights:
        """Refuse weights that a file cannot refer to, before the model runs."""
        if not isinstance(f, str | os.PathLike):
            raise InputError("weights: the file refers to them; give f, the file to write")
        provider("weights_of_checkpoint").check(weights)
        return cls(weights, Path(f), dynamo)

    def written(
        self, run: Callable[[str | None], torch.onnx.ONNXProgram | None]
    ) -> torch.onnx.ONNXProgram | None:
        """Export without weights; the TorchScript exporter first writes a file with weights, beside the target."""
        write = provider("weights_of_checkpoint").write
        if self.dynamo:
            program = run(None)
            write(program, self.weights, self.file)
            return program
        with work_folder(self.file) as work:
            file = work.new / self.file.name
            run(os.fspath(file))
            write(file, self.weights, self.file)
        return None


def _steps_after(
    model: Any,
    names: str | None,
    functions: ModulesAsFunctions,
) -> list[AfterExport]:
    """The changes of the tagged model that are requested as options of the export."""
    from htp_export.exporter.after_export import NamesOfModules

    steps: list[AfterExport] = []
    if names is not None:
        steps.append(NamesOfModules(names))
    if functions:
        steps.append(provider("module_functions").ModuleFunctions(functions, model))
    return steps


@contextlib.contextmanager
def tagging(*, strict: bool = True) -> Iterator[None]:
    """Tag the files of every ``torch.onnx.export`` inside, also of libraries that call it.

    Applies to the thread or task that enters it. Exports with tags in several threads run one after
    the other. May be nested; the innermost one applies. Torch is restored afterwards, also on
    errors.

    ``torch.export.export`` is captured, too, and the capture is stored in its program: exporting
    that program, inside or later, produces the same tags as exporting the model.

    Args:
        strict: Whether an export fails if htp_export cannot capture it. If not, the model is
            exported without tags, and an `htp_export.errors.UntaggedExportWarning` has the
            reason. Errors of the model and of torch are raised in both cases. Also applies to
            `export` inside.

    Returns:
        A context manager.

    Raises:
        CaptureError: htp_export failed to capture an export; raised by the export.
        TorchChangedError: The installed torch lacks a part that htp_export needs.

    Examples:
        >>> import torch
        >>> from torch.onnx import export as theirs
        >>> with tagging():
        ...     program = theirs(torch.nn.ReLU().eval(), (torch.randn(2),), verbose=False)
        >>> program.model.metadata_props["htp.version"]
        '1'
    """
    exporter = _Exporter(strict, follow=True)
    changes = Changes()
    try:
        try:
            for entry in (patches.DYNAMO_ENTRY, patches.REPLACEMENTS, patches.TORCHSCRIPT_ENTRY):
                _watch(changes, entry, exporter)
            if running.hurries.get():
                patches.FASTER_START.hold(changes)
            set_variable(changes, running.exporter, exporter)
            changes.will_undo(exporter.end)  # for tasks that were started inside and continue
            yield
            exporter.settle()
        finally:
            changes.take_back()
    finally:
        changes.take_back()


def _watch(changes: Changes, entry: Patches, exporter: Any) -> None:
    """Apply the patches of one of torch's exporters, if possible."""
    try:
        entry.hold(changes)
    except TorchChangedError as fault:
        if exporter.strict:
            raise
        export_untagged(fault)


class _Exporter:
    """Replaces torch's exporters; with ``follow``, tags are updated when tagged models change."""

    def __init__(self, strict: bool = True, *, follow: bool = False) -> None:
        self.strict = strict
        self.ended = False
        # kept alive by their models
        self._rewritings: weakref.WeakSet[Rewriting] = weakref.WeakSet()
        self._follow = self._rewritings.add if follow else None

    def end(self) -> None:
        self.ended = True
        for rewriting in list(self._rewritings):
            rewriting.end()

    def replaced(self, old: Any, new: Any) -> None:
        for rewriting in list(self._rewritings):
            rewriting.replaced(old, new)

    def settle(self) -> None:
        for rewriting in list(self._rewritings):
            rewriting.settle()

    def dynamo(self, export: Callable[[], Any], model: Any) -> Any:
        return running.alone(self._run(export, functools.partial(Dynamo, model, self._follow)))

    def program(self, export: Callable[[], Any], model: Any) -> Any:
        return running.alone(self._run(export, functools.partial(Program, model)))

    def torchscript(
        self,
        export: Callable[[], Any],
        model: Any,
        args: Any,
        names_inputs: bool,
    ) -> Callable[[Changes], Any]:
        """Return the export, to be run by `running.alone`: torch walks the frames above each operation."""
        return self._run(export, functools.partial(TorchScript, model, args, names_inputs))

    def _run(
        self, export: Callable[[], Any], begin: Callable[[Changes], Dynamo | Program | TorchScript]
    ) -> Callable[[Changes], Any]:
        """Return an export with its capture; without tags, if that is impossible and not strict."""

        def run(changes: Changes) -> Any:
            try:
                with seam("reading the names of the model's modules and parameters"):
                    watched = begin(changes)
                for places in watched.patches:
                    places.hold(changes)
            except (CaptureError, TorchChangedError) as fault:
                if self.strict:
                    raise
                export_untagged(fault)
            else:
                watched.capture.strict = self.strict
                return watched.run(export)
            # exports inside this one get no tags, either
            set_variable(changes, running.exporter, None)
            return export()

        return run
