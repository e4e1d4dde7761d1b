"""Changes of the tagged graph of an export before its file is written: other names, functions."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnx_ir as ir
import torch

from htp_export.editing.path_names import check_style, check_tags, give_path_names
from htp_export.exporter.export_arguments import Run
from htp_export.files.filesystem import is_special, temporary_folder
from htp_export.files.model_files import write_model
from htp_export.files.write_file import work_folder
from htp_export.files.written_check import made_from
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, load

_log = logging.getLogger(__name__)


class AfterExport(Protocol):
    """A change of a tagged model that is a part of its export."""

    def made_of(
        self,
        model: ModelSource,
        output: str | os.PathLike[str] | None = None,
        *,
        strict: bool,
    ) -> HoldsModel | TaggedModel | None:
        """Return a changed model, and write it to ``output``; None if nothing was changed.

        With ``strict``, a model without tags is an error; else it is left unchanged.
        """


def around(
    step: AfterExport,
    exporter: Any,
    run: Run,
    *,
    dynamo: bool,
) -> tuple[Any, Run]:
    """The exporter and ``torch.onnx.export``, followed by a change of the model.

    The TorchScript exporter returns no model, so its file is read.
    """
    if dynamo:
        return _ChangedPrograms(exporter, step), run

    def exported(
        model: Any,
        args: Any,
        f: Any,
        **options: Any,
    ) -> torch.onnx.ONNXProgram | None:
        with _written_to(step, f, strict=exporter.strict) as file:
            return run(model, args, file, **options)

    return exporter, exported


class _ChangedPrograms:
    """An exporter under ``dynamo=True`` whose programs are changed."""

    def __init__(self, exporter: Any, step: AfterExport) -> None:
        self._exporter = exporter
        self._step = step

    def dynamo(self, export: Callable[[], Any], model: Any) -> Any:
        program = self._exporter.dynamo(export, model)
        changed = self._step.made_of(program, strict=self._exporter.strict)
        if changed is not None:
            program.model = changed.model
        return program

    def __getattr__(self, name: str) -> Any:
        """Every other attribute of the exporter."""
        return getattr(self._exporter, name)


@contextlib.contextmanager
def _written_to(step: AfterExport, f: Any, *, strict: bool) -> Iterator[Any]:
    """Provide a target for torch's file; at the end, the changed model is written to ``f``.

    Nothing is changed if ``f`` is neither a path nor a binary stream.
    """
    if isinstance(f, str | os.PathLike):
        with _folder_beside(Path(f)) as folder:
            file = folder / (Path(f).name or "model.onnx")
            yield os.fspath(file)
            tagged = load(file)
            if step.made_of(tagged, f, strict=strict) is None:
                tagged.save(f)
    elif hasattr(f, "write"):
        stream = io.BytesIO()
        yield stream
        model = onnx.load_model_from_string(stream.getvalue())
        changed = step.made_of(model, strict=strict)
        if changed is None:
            f.write(stream.getvalue())
        else:
            f.write(ir.to_proto(changed.model).SerializeToString())
    else:
        yield f


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    if is_special(target):
        with temporary_folder() as folder:
            yield folder
        return
    with work_folder(target) as work:
        yield work.new


class NamesOfModules:
    """``names`` of `export`: nodes and tensors are named after modules.

    Raises an `InputError` for an unknown style.
    """

    def __init__(self, style: str) -> None:
        check_style(style)

    def made_of(
        self,
        model: ModelSource,
        output: str | os.PathLike[str] | None = None,
        *,
        strict: bool,
    ) -> TaggedModel | None:
        """Rename the nodes and tensors of a copy."""
        tagged = load(model)
        if not strict and tagged.source != "htp":
            _log.warning("torch's names stay: the model was exported without module tags")
            return None
        check_tags(tagged)
        work = tagged.clone()
        give_path_names(work)
        if output is not None:
            with made_from(lambda: [tagged.model]):
                write_model(work.model, output)
        return work
