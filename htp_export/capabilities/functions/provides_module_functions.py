"""``export_modules_as_functions``: modules that an export writes as ONNX functions.

torch's dynamo exporter ignores the option, and the pass behind it in the TorchScript exporter fails
on most models (https://github.com/pytorch/pytorch/issues/154319). Both are therefore called without
it: the tagged graph is complete, and `htp_export.capabilities.functions.nesting.functions` makes
functions of it before the file is written.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from htp_export.capabilities.functions.nesting import Nested, functions
from htp_export.errors import InputError, UntaggedModelError
from htp_export.exporter.after_export import ModulesAsFunctions
from htp_export.format import selectors
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.tagged import ModelSource, load

_log = logging.getLogger(__name__)

_MOST_SAID = 5
"""Modules that a warning names."""


class ModuleFunctions:
    """The modules that are to be functions; their names are checked if the modules of the model are known.

    Raises:
        InputError: If no module has one of the classes, or if ``wanted`` is none of what it may be.
        SelectorError: If a selector cannot be read or matches no module.
    """

    def __init__(self, wanted: ModulesAsFunctions, model: Any) -> None:
        self._every = wanted is True
        listed: Any = (
            ["**"] if wanted is True else [wanted] if isinstance(wanted, str | type) else wanted
        )
        if isinstance(listed, torch.nn.Module) or not isinstance(listed, Collection):
            raise _no_modules(listed)
        self._wanted: list[Any] = list(listed)
        for each in self._wanted:
            if not isinstance(each, str) and not (
                isinstance(each, type) and issubclass(each, torch.nn.Module)
            ):
                raise _no_modules(each)
        if isinstance(model, torch.nn.Module):
            classes = Hierarchy.from_module(model).classes
            selectors.select(self._selector(classes), classes)

    def made_of(
        self, model: ModelSource, output: str | os.PathLike[str] | None = None, *, strict: bool
    ) -> Nested | None:
        """Make the functions; None if the graph stays as it is, because every module was wanted and none can be one.

        A model without tags stays as it is, too, unless ``strict``. Raises what `functions` raises.
        """
        tagged = load(model)
        if not strict and tagged.source != "htp":
            _log.warning("no module is a function: the model was exported without module tags")
            return None
        try:
            nested = functions(tagged, self._selector(tagged.hierarchy.classes), output)
        except InputError as error:
            if not self._every or isinstance(error, UntaggedModelError):
                raise
            _log.warning("%s", error)
            return None
        # One expects a function of these; that a Dropout is none surprises nobody.
        expected = {path for path, info in tagged.hierarchy.items() if path and info.fate.does_work}
        listed = [
            f"{path!r} is no function: {why}"
            for path, why in nested.skipped.items()
            if path in expected
        ]
        if listed:
            first = "; ".join(listed[:_MOST_SAID])
            more = (
                f"; nor are {len(listed) - _MOST_SAID} more modules"
                if len(listed) > _MOST_SAID
                else ""
            )
            _log.warning("%s%s", first, more)
        return nested

    def _selector(self, classes: Mapping[str, str]) -> list[str]:
        """The wanted modules as a selector for modules of these classes."""
        return [
            each if isinstance(each, str) else f"class:{_class_among(each, classes)}"
            for each in self._wanted
        ]


def _no_modules(value: Any) -> InputError:
    said = type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)
    return InputError(
        f"export_modules_as_functions={said}: it takes True, classes of modules, or a selector such as "
        "'encoder.layer.*' or 'class:LlamaDecoderLayer'"
    )


def _class_among(wanted: type, classes: Mapping[str, str]) -> str:
    """The name of a class as the modules of a model have it; an `InputError` if no module has it."""
    full, known = f"{wanted.__module__}.{wanted.__qualname__}", set(classes.values())
    for name in (full, wanted.__name__):  # scripted modules are known by the simple name
        if name in known:
            return name
    simple = sorted({name.rpartition(".")[2] for name in known} - {""})
    nearest = difflib.get_close_matches(wanted.__name__, simple, n=3, cutoff=0.4) or simple[:3]
    listed = f"; nearest: {', '.join(map(repr, nearest))}" if nearest else ""
    raise InputError(f"export_modules_as_functions: no module has the class {full!r}{listed}")
