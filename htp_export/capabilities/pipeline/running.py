"""pipeline(): steps one after the other, each into a file; the last file tells how it was made."""

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
from htp_export.files.parsing import parsed_or_none
from htp_export.files.targets import check_target, files_named_in
from htp_export.files.text_files import line_in_yaml, read_yaml
from htp_export.files.written_check import made_from
from htp_export.format import tags
from htp_export.format.model_metadata import ProvenanceNote, read_provenance, write_provenance
from htp_export.model.hashes import content_hash
from htp_export.model.parts import weight_bytes
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, load, model_of, name_of
from htp_export.process.argument_types import checks_arguments
from htp_export.process.progress import counted
from htp_export.reporting.columns import Column
from htp_export.reporting.result import PlainData, Table


@dataclass(frozen=True)
class StepReport(PlainData):
    """What became of one step.

    Attributes:
        number: Its place, from 1.
        name: The step.
        status: ``ran``; ``kept``: an earlier run had done it; ``failed``: the check did not hold;
            ``skipped``.
        seconds: How long it took.
        nodes: Number of nodes of the model afterwards, including those in subgraphs; None if it is
            unknown.
        bytes: Bytes of its weights, shared ones once; the same.
        summary: What a check found, in one line.
        file: The file that a change made; None for a check.
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
        steps: What became of each step, in order.
        provenance: The steps that made the model, as its metadata has them; earlier pipelines
            first.
        output: The file that was written; None if a check failed.
        same: When the pipeline of a file was repeated: whether its model came out again. None
            otherwise.
        model: The model; if a check failed, the one that it was given.
    """

    derived = ("ok", "summary")

    steps: tuple[StepReport, ...]
    provenance: tuple[ProvenanceNote, ...]
    output: Path | None
    same: bool | None = None
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def failed(self) -> StepReport | None:
        """The check that did not hold."""
        return next((report for report in self.steps if report.status == "failed"), None)

    @property
    def ok(self) -> bool:
        """Whether all checks held, and a repeated pipeline made the same model."""
        return self.failed is None and self.same is not False

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        if self.failed is not None:
            left = sum(1 for report in self.steps if report.status == "skipped")
            skipped = f"; {left} skipped" if left else ""
            return f"step {self.failed.number} ({self.failed.name}) does not hold{skipped}; the output is not written"
        kept = sum(1 for report in self.steps if report.status == "kept")
        done = f"{len(self.steps)} steps{f', {kept} kept from an earlier run' if kept else ''}"
        again = {
            True: "; the same model came out again",
            False: "; another model came out than before",
            None: "",
        }
        return done + again[self.same]

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
    """Run passes, tools, and checks on a model, one after the other, and write down how the result was made.

    Each step that changes the model writes a file into a folder, and stays there. If the same
    pipeline runs again, it goes on after the last file that the same steps made from the same
    model, with the same versions of packages. The pipeline stops at the first check that does not
    hold (``compare``, ``verify``); then ``output`` is not written.

    The metadata of every file has the steps that made it (``htp.provenance``), with options,
    versions and hashes. A pipeline can be read from there, and repeated.

    Not thread-safe if it runs tools, which redirect the output of the whole process. Two pipelines
    must not share a folder at the same time.

    Args:
        steps: A list of names and of ``{name: options}``; or a YAML or JSON file with such a list,
            or with ``steps``, ``model``, ``output`` and ``folder``; or an ONNX file that a pipeline
            made, whose steps are repeated.
        model: The model to begin with: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or
            ``ir.Model``; not changed. None for the one that the file names.
        output: The file to write; None for the one that the file names.
        folder: Folder for the files of the steps, made if it is not there; None for the name of
            ``output`` and ``.steps``.
        resume: Whether to go on after what an earlier run has done.
        allow_entry: Whether the options of steps that are read from an ONNX file may name code: an
            ``entry``, options that are handed to another tool. The files that they name have to be
            in the folder of that file anyway.

    Returns:
        What became of each step; ``ok`` is False if a check failed, or a repeated pipeline made
        another model.

    Raises:
        InputError: If there is no such step or option, or no model or output; nothing was run.
        FileError: If a file cannot be read or written, or an ONNX file has steps with options that
            are not allowed.
        StepError: If a step fails; the files of the steps before it stay.

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
    else:
        read = steps if isinstance(steps, PipelineFile) else PipelineFile(tuple(steps_of(steps)))
    source, target = (
        read.model if model is None else model,
        read.output if output is None else output,
    )
    if source is None or target is None:
        raise InputError(
            f"a pipeline needs {'a model to begin with' if source is None else 'an output to write'}"
        )
    named = [
        steps if isinstance(steps, str | os.PathLike) else None,
        *(step.options for step in read.steps),
    ]
    check_target(target, reads=files_named_in(named))
    if (
        isinstance(source, str | os.PathLike)
        and Path(target).exists()
        and Path(target).samefile(source)
    ):
        raise FileError(Path(target), "is the model to begin with; name another file to write")
    place = folder if folder is not None else read.folder
    run = _Run(
        read.steps, source, Path(target), Path(f"{target}.steps" if place is None else place)
    )
    run.check_files()
    with _located(read.file):
        check_values(read.steps, run.start)
    with made_from(lambda: [model_of(source)]):
        return run.result(read.made, resume=resume)


@contextlib.contextmanager
def _located(file: Path | None) -> Iterator[None]:
    """Name the file and the line of a step or an option that cannot be used; nothing if it stands in no file."""
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
    """What a file says of a pipeline; None where it says nothing.

    ``made``: Of an ONNX file that a pipeline made, the steps that made it. ``file``: The YAML or
    JSON file, if there is one.
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
    """Read a pipeline from a YAML or JSON file, or from the metadata of an ONNX file that a pipeline made.

    Each step is given to ``prepare``, which returns it with options for its function, such as a
    model that is named.
    """
    file = Path(path)
    if file.suffix.lower() not in (".yaml", ".yml", ".json"):
        made = read_provenance(read_model(file).metadata_props)
        if not made:
            raise FileError(file, "does not say how it was made: no pipeline wrote it")
        gone = next((note for note in made if not is_repeatable(note.options)), None)
        if gone is not None:
            raise FileError(
                file,
                f"cannot be repeated: step {gone.step} had an option that was an object of Python",
            )
        listed = [{note.step: note.options} for note in made]
        return PipelineFile(
            tuple(steps_of(listed, prepare, file, allow_entry=allow_entry)), made=made
        )
    content = read_yaml(file)
    content = content if isinstance(content, Mapping) else {"steps": content}
    for key in content:
        if key not in ("steps", *_FILES):
            raise FileError(file, f"there is no key {key!r}; there are steps, {', '.join(_FILES)}")
        if key in _FILES and not isinstance(content[key], str | None):
            problem = f"line {line_in_yaml(file, (key,))}: {key} is {content[key]!r}, and takes the name of a file"
            raise FileError(file, problem)
    model, output, folder = (
        None if content.get(key) is None else Path(content[key]) for key in _FILES
    )
    if model is not None and is_special(model):
        raise FileError(model, f"is no plain file; {file} names it as the model to begin with")
    with _located(file):
        return PipelineFile(
            tuple(steps_of(content.get("steps"), prepare)), model, output, folder, file=file
        )


def _is_of_pipeline(file: Path) -> bool:
    model = parsed_or_none(file)
    return model is not None and tags.PROVENANCE in model.metadata_props


class _Run:
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
        """Refuse a folder for the files of the steps that is none, and files that would be replaced and are of others.

        The caller named none of these files: only those that a pipeline wrote are replaced.
        """
        if os.path.lexists(self._folder) and not self._folder.is_dir():
            raise FileError(
                self._folder,
                "is no folder; the files of the steps are written into one of this name",
            )
        numbered = [
            (number, step) for number, step in enumerate(self._steps, 1) if not step.kind.check
        ]
        files = [self._file_of(number, step) for number, step in numbered]
        for file in filter(os.path.lexists, files):
            check_target(file)
            if is_special(file):
                raise FileError(
                    file, "is no plain file; name another folder for the files of the steps"
                )
            if not _is_of_pipeline(file):
                problem = "was not written by a pipeline; remove it, or name another folder for the files of the steps"
                raise FileError(file, problem)

    def result(self, made: Sequence[ProvenanceNote], *, resume: bool) -> PipelineRun:
        """Run the steps; ``made`` are those that are repeated, if that is so."""
        if made and made[0].input != self._hash:
            raise InputError(
                "the pipeline of this file began with another model than the one that is given"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        done = self._resumed() if resume else 0
        for number, step in enumerate(counted(self._steps[done:], "steps"), done + 1):
            if self._reports and self._reports[-1].status in ("failed", "skipped"):
                self._reports.append(StepReport(number, step.name, "skipped"))
            else:
                self._reports.append(self._done(number, step))
        ok = all(report.status in ("ran", "kept") for report in self._reports)
        if ok:
            self._model = model_of(self._source if self._file is None else self._file)
            final = self._model.clone() if self._file is None else self._model
            write_provenance(final.metadata_props, self._notes)
            write_model(final, self._output, True if self._external else None)
            self._model = final
        same = self._notes[-1].output == made[-1].output if made and ok else None
        output = self._output if ok else None
        return PipelineRun(
            tuple(self._reports), tuple(self._notes), output, same, model=self._model
        )

    def _done(self, number: int, step: PipelineStep) -> StepReport:
        begun = time.perf_counter()
        starting = {step.kind.start: self._source} if step.kind.start else {}
        options = {
            **starting,
            **step.options,
            step.kind.given: self._source if self._file is None else self._file,
        }
        note = ProvenanceNote(step.name, step.written, self._hash, "", step.files, step.versions)
        given = self._file or name_of(self._source, "the model")
        try:
            result = step.kind.load()(**options)
        except Exception as error:
            raise StepError(number, step.name, given, error) from error
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
            raise StepError(number, step.name, given, error) from error
        return _report(number, step, "ran", model, self._file, seconds=time.perf_counter() - begun)

    def _file_of(self, number: int, step: PipelineStep) -> Path:
        return self._folder / f"{number:02}-{step.name}.onnx"

    def _resumed(self) -> int:
        """Take over what an earlier run has done, and return the number of its steps."""
        for number in range(len(self._steps), 0, -1):
            file = self._file_of(number, self._steps[number - 1])
            if self._steps[number - 1].kind.check or not file.is_file():
                continue
            try:
                model = read_model(file)
                notes = read_provenance(model.metadata_props)
            except HtpExportError:
                continue
            if self._is_of(notes, number) and notes[-1].output == content_hash(model):
                self._notes, self._hash, self._file, self._model = (
                    list(notes),
                    notes[-1].output,
                    file,
                    model,
                )
                self._reports = [self._kept(place) for place in range(1, number + 1)]
                return number
        return 0

    def _kept(self, number: int) -> StepReport:
        step, file = self._steps[number - 1], self._file_of(number, self._steps[number - 1])
        if step.kind.check or not file.is_file():
            return StepReport(number, step.name, "kept")
        return _report(number, step, "kept", read_model(file), file)

    def _is_of(self, notes: Sequence[ProvenanceNote], number: int) -> bool:
        """Whether notes are those of the first steps of this pipeline, on this model."""
        earlier = len(self._history)
        own, hash_before = notes[earlier:], self._start_hash
        if len(own) != number or tuple(notes[:earlier]) != self._history:
            return False
        for note, step in zip(own, self._steps, strict=False):
            wanted = replace(note, step=step.name, options=step.written, input=hash_before,
                             files=step.files, versions=step.versions)  # fmt: skip
            if note != wanted or not is_described(note.options):
                return False
            hash_before = note.output
        return True


def _report(
    number: int, step: PipelineStep, status: Any, model: ir.Model, file: Path, seconds: float = 0.0
) -> StepReport:
    stored = {
        id(value.const_value): value
        for graph in model.graphs()
        for value in graph.initializers.values()
    }
    nodes, size = sum(1 for _ in all_nodes(model)), weight_bytes(stored.values())
    return StepReport(number, step.name, status, seconds, nodes, size, file=file)
