"""``names`` of `export`: nodes and tensors that are named after modules."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.files.model_files import write_model
from htp_export.files.written_check import made_from
from htp_export.model.path_names import check_style, check_tags, give_path_names
from htp_export.model.tagged import HoldsModel, ModelSource, load

__all__ = ["NamesOfModules"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _NamedModel(HoldsModel):
    model: ir.Model


class NamesOfModules:
    """Names of a style, for what an export makes.

    Args:
        style: The style.

    Raises:
        InputError: There is no such style.
    """

    def __init__(self, style: str) -> None:
        check_style(style)

    def made_of(
        self, model: ModelSource, output: str | os.PathLike[str] | None = None, *, strict: bool
    ) -> HoldsModel | None:
        """Name the nodes and tensors of a copy; None if a model has no tags, and need not have.

        Args:
            model: The tagged model.
            output: The file to write.
            strict: Whether a model without tags is an error; else it stays as it is.

        Raises:
            UntaggedModelError: The model has no tags.
        """
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
        return _NamedModel(work.model)
