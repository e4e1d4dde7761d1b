"""`htp_export.pipeline`: run steps in sequence, each into a file, and record them in the metadata."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from htp_export.capabilities.pipeline.pipeline_steps import (
    PipelineStep,
    StepOptionError,
    check_values,
    steps_of,
)
from htp_export.capabilities.pipeline.step_options import is_described, is_repeatable
from htp_export.errors import FileError, HtpExportError, InputError, ResultError, StepError
from htp_export.files.filesystem import is_special
from htp_export.files.model_files import has_external_data, read_model, write_model
from htp_export.files.own_data import FileHeader
from htp_export.files.targets import check_target, files_named_in
from htp_export.files.text_files import line_in_yaml, read_yaml
from htp_export.files.written_check import made_from
from htp_export.format import tags
from htp_export.format.model_metadata import ProvenanceNote, read_provenance, write_provenance
from htp_export.model.hashes import content_hash
from htp_export.model.parts import weight_bytes
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import (
    HoldsModel,
    ModelSource,
    TaggedModel,
    is_of_user,
    load,
    model_of,
    name_of,
)
from htp_export.process.argument_types import checks_arguments
from htp_export.process.progress import counted
from htp_export.reporting.columns import Column
from htp_export.reporting.result import PlainData, Table


@dataclass(frozen=True)
class StepReport(PlainData):
    """The outcome of one step.

    Attributes:
        number: Its position, from 1.
        name: The step.
        status: ``ran``; ``kept``: an earlier run completed it; ``failed``: the check failed;
            ``skipped``.
        seconds: Its duration.
        nodes: Number of nodes of the model afterwards, subgraphs included; None if unknown.
        bytes: Bytes of the model's weights afterwards, shared weights once; None if unknown.
        summary: The result of a check, in one line.
        file: The file that a change wrote; None for a check.
    """

    number: int
    name: str
    status: Literal["ran", "kept", "failed", "skipped"]
    seconds: float = 0.0
    nodes: int | None = None
    bytes: int | None = None
    summary: str = ""
    file: Path | None = None


_COLUMNS: tuple[Column[StepReport], ...] = (
    Column("number", "step"),
    Column("name", "name", right=False),
    Column("status", "status", right=False),
    Column("nodes", "nodes"),
    Column("bytes", "weights", unit="B"),
    Column("seconds", "seconds", lambda report: round(report.seconds, 1)),
    Column("summary", "", right=False),
)


@dataclass(frozen=True)
class PipelineRun(HoldsModel):
    """The result of `htp_export.pipeline`.

    Attributes:
        steps: The outcome of each step, in order.
        provenance: The steps that produced the model, as in its metadata; earlier pipelines first.
        output: The written file; None if a check failed.
        same: For the repeated pipeline of a file, whether it produced the same model; None
            otherwise.
        model: The model; if a check failed, its input.
    """

    derived = ("ok", "summary")

    steps: tuple[StepReport, ...]
    provenance: tuple[ProvenanceNote, ...]
    output: Path | None
    same: bool | None = None
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def failed(self) -> StepReport | None:
        """The check that failed."""
        return next((report for report in self.steps if report.status == "failed"), None)

    @property
    def ok(self) -> bool:
        """Whether all checks succeeded, and a repeated pipeline produced the same model."""
        return self.failed is None and self.same is not False

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        statuses = [report.status for report in self.steps]
        if self.failed is not None:
            skipped = statuses.count("skipped")
            skips = f"; {skipped} skipped" if skipped else ""
            return f"step {self.failed.number} ({self.failed.name}) does not hold{skips}; the output is not written"
        text = f"{len(self.steps)} steps"
        kept = statuses.count("kept")
        if kept:
            text += f", {kept} kept from an earlier run"
        if self.same is not None:
            same = "the same model came out again"
            other = "another model came out than before"
            text += f"; {same if self.same else other}"
        return text

    def table(self) -> Table:
        """The steps."""
        return _COLUMNS, self.steps


@checks_arguments
def pipeline(
    steps: str | os.PathLike[str] | Sequence[Any] | PipelineFile,
    model: ModelSource | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = True,
    allow_entry: bool = False,
) -> PipelineRun:
    """Run passes, tools, and checks on a model in sequence, and record the steps in the result's metadata.

    Each step that changes the model writes a file into a folder, which is kept. If the same
    pipeline runs again, it continues after the last file that the same steps produced from the same
    model, with the same versions of packages. The pipeline stops at the first check that fails
    (``compare``, ``verify``); then ``output`` is not written.

    The metadata of every file records the steps that produced it (``htp.provenance``), with
    options, versions and hashes. A pipeline can be loaded from there, and repeated.

    Not thread-safe if it runs tools, which redirect the output of the whole process. Two pipelines
    must not share a folder at the same time.

    Args:
        steps: A list of names and of ``{name: options}``; or a YAML or JSON file with such a list,
            or with ``steps``, ``model``, ``output`` and ``folder``; or an ONNX file that a pipeline
            wrote, whose steps are repeated.
        model: The model to begin with: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or
            ``ir.Model``; not changed. None for the model that the file names.
        output: The file to write; None for the output that the file names.
        folder: Folder for the files of the steps, created if needed; None for the name of
            ``output`` and ``.steps``.
        resume: Whether to continue after the last step that an earlier run completed.
        allow_entry: Whether options of steps from an ONNX file may name code: an ``entry``, options
            that are passed to another tool. Files that they name always have to be in the folder of
            the ONNX file.

    Returns:
        The outcome of each step; ``ok`` is False if a check failed, or if a repeated pipeline
        produced another model.

    Raises:
        InputError: If there is no such step or option, or no model or output; nothing was run.
        FileError: If a file cannot be read or written, or the steps of an ONNX file have options
            that are not allowed.
        StepError: If a step fails; the files of the steps before it are kept.

    Examples:
        >>> import pathlib, tempfile, torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = htp_export.pipeline(["optimize", "compare"], exported, pathlib.Path(folder, "small.onnx"))
        >>> result.ok, [step.status for step in result.steps], [note.step for note in result.provenance]
        (True, ['ran', 'ran'], ['optimize', 'compare'])
    """
    if isinstance(steps, str | os.PathLike):
        read = read_pipeline(steps, allow_entry=allow_entry)
    elif isinstance(steps, PipelineFile):
        read = steps
    else:
        read = PipelineFile(tuple(steps_of(steps)))
    source = read.model if model is None else model
    target = read.output if output is None else output
    if source is None:
        raise InputError("a pipeline needs a model to begin with")
    if target is None:
        raise InputError("a pipeline needs an output to write")
    _check_target(Path(target), source, steps, read.steps)
    steps_folder = read.folder if folder is None else folder
    if steps_folder is None:
        steps_folder = f"{target}.steps"
    run = _Run(read.steps, source, Path(target), Path(steps_folder))
    run.check_files()
    with _located(read.file):
        check_values(read.steps, run.start)
    with made_from(lambda: [model_of(source)]):
        return run.result(read.made, resume=resume)


def _check_target(
    target: Path, source: ModelSource, steps: Any, parsed: Sequence[PipelineStep]
) -> None:
    """Refuse an output that is the model to begin with, or another file that the pipeline needs."""
    step_file = steps if isinstance(steps, str | os.PathLike) else None
    check_target(target, reads=files_named_in([step_file, *(step.options for step in parsed)]))
    if isinstance(source, str | os.PathLike) and target.exists() and target.samefile(source):
        raise FileError(target, "is the model to begin with; name another file to write")


@contextlib.contextmanager
def _located(file: Path | None) -> Iterator[None]:
    """Add the file and the line to the error of a step or an option; without a file, the error is unchanged."""
    try:
        yield
    except StepOptionError as error:
        if file is None:
            raise
        place: tuple[int | str, ...] = error.place
        if isinstance(read_yaml(file), Mapping):
            place = ("steps", *place)
        raise FileError(file, f"line {line_in_yaml(file, place)}: {error}") from error


@dataclass(frozen=True)
class PipelineFile:
    """The contents of a pipeline file; None for missing entries.

    ``made``: For an ONNX file that a pipeline wrote, the steps that produced it. ``file``: The YAML
    or JSON file, if there is one.
    """

    steps: tuple[PipelineStep, ...]
    model: Path | None = None
    output: Path | None = None
    folder: Path | None = None
    made: tuple[ProvenanceNote, ...] = ()
    file: Path | None = None


_FILES = ("model", "output", "folder")


def read_pipeline(
    path: str | os.PathLike[str],
    prepare: Callable[[PipelineStep], PipelineStep] = lambda step: step,
    *,
    allow_entry: bool = False,
) -> PipelineFile:
    """Read a pipeline from a YAML or JSON file, or from the metadata of an ONNX file that a pipeline wrote.

    ``prepare`` is called with each step, and returns it with options for its function: it replaces
    the name of a model, for example, by the model.
    """
    file = Path(path)
    if file.suffix.lower() in (".yaml", ".yml", ".json"):
        return _from_text(file, prepare)
    notes = provenance_of(file, read_model(file))
    for note in notes:
        if not is_repeatable(note.options):
            raise FileError(
                file, f"cannot be repeated: step {note.step} had an option that was a Python object"
            )
    listed = [{note.step: note.options} for note in notes]
    steps = steps_of(listed, prepare, file, allow_entry=allow_entry)
    return PipelineFile(tuple(steps), made=notes)


def provenance_of(file: Path, model: ir.Model) -> tuple[ProvenanceNote, ...]:
    """Return the steps that produced a model; a `FileError` if no pipeline wrote its file."""
    notes = read_provenance(model.metadata_props)
    if not notes:
        raise FileError(
            file,
            "has no record of how it was made: no pipeline wrote it; to run steps on it, name a file of steps, "
            f"pipeline steps.yaml --model {file} -o OUTPUT.onnx",
        )
    return notes


def _from_text(file: Path, prepare: Callable[[PipelineStep], PipelineStep]) -> PipelineFile:
    """Read a pipeline from a YAML or JSON file: a list of steps, or a mapping with ``steps`` and names of files."""
    content = read_yaml(file)
    if not isinstance(content, Mapping):
        content = {"steps": content}
    for key in content:
        if key not in ("steps", *_FILES):
            raise FileError(file, f"there is no key {key!r}; there are steps, {', '.join(_FILES)}")
        if key in _FILES and not isinstance(content[key], str | None):
            problem = f"line {line_in_yaml(file, (key,))}: {key} is {content[key]!r}, and takes the name of a file"
            raise FileError(file, problem)
    paths = {key: Path(content[key]) for key in _FILES if content.get(key) is not None}
    model = paths.get("model")
    if model is not None and is_special(model):
        raise FileError(model, f"is no plain file; {file} names it as the model to begin with")
    with _located(file):
        steps = steps_of(content.get("steps"), prepare)
    return PipelineFile(
        tuple(steps), model, output=paths.get("output"), folder=paths.get("folder"), file=file
    )


def _is_of_pipeline(file: Path) -> bool:
    """Whether a pipeline wrote a file."""
    header = FileHeader.of(file)
    return header is not None and tags.PROVENANCE in header.metadata


class _Run:
    """One run of the steps on a model; its state is the model, notes and reports so far."""

    def __init__(
        self, steps: Sequence[PipelineStep], source: ModelSource, output: Path, folder: Path
    ) -> None:
        self._steps, self._source, self._output, self._folder = steps, source, output, folder
        self._start = model_of(source)
        self._external = has_external_data(self._start)
        self._history = read_provenance(self._start.metadata_props)
        self._hash = self._start_hash = content_hash(self._start)
        self._notes: list[ProvenanceNote] = list(self._history)
        self._reports: list[StepReport] = []
        self._file: Path | None = None
        self._model = self._start

    def start(self) -> TaggedModel:
        return self._source if isinstance(self._source, TaggedModel) else load(self._start)

    def check_files(self) -> None:
        """Refuse a folder for the files of the steps that is a file, or that contains other files of their names.

        The caller did not name these files: only files that a pipeline wrote are replaced.
        """
        if os.path.lexists(self._folder) and not self._folder.is_dir():
            raise FileError(
                self._folder,
                "is no folder; the files of the steps are written into a folder of this name",
            )
        for number, step in enumerate(self._steps, 1):
            file = self._file_of(number, step)
            if step.kind.check or not os.path.lexists(file):
                continue
            check_target(file)
            if is_special(file):
                raise FileError(
                    file, "is no plain file; name another folder for the files of the steps"
                )
            if not _is_of_pipeline(file):
                problem = "was not written by a pipeline; remove it, or name another folder for the files of the steps"
                raise FileError(file, problem)

    def result(self, made: Sequence[ProvenanceNote], *, resume: bool) -> PipelineRun:
        """Run the steps; ``made`` are the notes of a pipeline that is repeated."""
        if made and made[0].input != self._hash:
            raise InputError("the pipeline of this file began with another model")
        self._folder.mkdir(parents=True, exist_ok=True)
        done = self._resumed() if resume else 0
        for number, step in enumerate(counted(self._steps[done:], "steps"), done + 1):
            if self._reports and self._reports[-1].status in ("failed", "skipped"):
                self._reports.append(StepReport(number, step.name, "skipped"))
            else:
                self._reports.append(self._done(number, step))
        reports, notes = tuple(self._reports), tuple(self._notes)
        if not all(report.status in ("ran", "kept") for report in reports):
            return PipelineRun(reports, notes, None, model=self._model)
        self._write_output()
        same = notes[-1].output == made[-1].output if made else None
        return PipelineRun(reports, notes, self._output, same, model=self._model)

    def _write_output(self) -> None:
        """Write the last model, with the notes of all steps, to the output."""
        if self._file is None:
            # There were only checks: the user's own model stays without notes.
            model = model_of(self._source)
            self._model = model.clone() if is_of_user(model, self._source) else model
        else:
            self._model = model_of(self._file)
        write_provenance(self._model.metadata_props, self._notes)
        write_model(self._model, self._output, True if self._external else None)

    def _done(self, number: int, step: PipelineStep) -> StepReport:
        """Run one step on the model so far."""
        begun = time.perf_counter()
        current = self._source if self._file is None else self._file
        options = {**step.options, step.kind.given: current}
        if step.kind.start:
            options.setdefault(step.kind.start, self._source)
        note = ProvenanceNote(step.name, step.written, self._hash, "", step.files, step.versions)
        model_name = self._file or name_of(self._source, "the model")
        try:
            result = step.kind.load()(**options)
        except Exception as error:
            raise StepError(number, step.name, model_name, error) from error
        if step.kind.check:
            seconds = time.perf_counter() - begun
            if not result.ok:
                return StepReport(number, step.name, "failed", seconds, summary=result.summary)
            self._notes.append(replace(note, output=self._hash))
            return StepReport(number, step.name, "ran", seconds, summary=result.summary)
        model: ir.Model = result.model
        self._hash = content_hash(model)
        self._notes.append(replace(note, output=self._hash))
        write_provenance(model.metadata_props, self._notes)
        self._file, self._model = self._file_of(number, step), model
        try:
            write_model(model, self._file, True if self._external else None)
        except ResultError as error:
            raise StepError(number, step.name, model_name, error) from error
        return _report(number, step, "ran", model, self._file, seconds=time.perf_counter() - begun)

    def _file_of(self, number: int, step: PipelineStep) -> Path:
        return self._folder / f"{number:02}-{step.name}.onnx"

    def _resumed(self) -> int:
        """Continue from the last valid file of an earlier run, and return the number of its steps."""
        for number in range(len(self._steps), 0, -1):
            step = self._steps[number - 1]
            file = self._file_of(number, step)
            if step.kind.check or not file.is_file():
                continue
            try:
                model = read_model(file)
                notes = read_provenance(model.metadata_props)
            except HtpExportError:
                continue
            if self._is_of(notes, number) and notes[-1].output == content_hash(model):
                self._notes, self._hash = list(notes), notes[-1].output
                self._file, self._model = file, model
                self._reports = [self._kept(earlier) for earlier in range(1, number + 1)]
                return number
        return 0

    def _kept(self, number: int) -> StepReport:
        """The report of a step that an earlier run completed."""
        step = self._steps[number - 1]
        file = self._file_of(number, step)
        if step.kind.check or not file.is_file():
            return StepReport(number, step.name, "kept")
        return _report(number, step, "kept", read_model(file), file)

    def _is_of(self, notes: Sequence[ProvenanceNote], number: int) -> bool:
        """Whether notes record the first ``number`` steps of this pipeline, on this model."""
        earlier = len(self._history)
        own, hash_before = notes[earlier:], self._start_hash
        if len(own) != number or tuple(notes[:earlier]) != self._history:
            return False
        for note, step in zip(own, self._steps, strict=False):
            expected = ProvenanceNote(
                step.name, step.written, hash_before, note.output, step.files, step.versions
            )
            if note != expected or not is_described(note.options):
                return False
            hash_before = note.output
        return True


def _report(
    number: int, step: PipelineStep, status: Any, model: ir.Model, file: Path, seconds: float = 0.0
) -> StepReport:
    """The report of a change, with the number of nodes and the bytes of weights of its model."""
    initializers: dict[int, ir.Value] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            initializers[id(value.const_value)] = value
    nodes, size = sum(1 for _ in all_nodes(model)), weight_bytes(initializers.values())
    return StepReport(number, step.name, status, seconds, nodes, size, file=file)
