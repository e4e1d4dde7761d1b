"""``export_modules_as_functions``: modules that an export writes as ONNX functions.

torch's dynamo exporter ignores the option, and the pass behind it in the TorchScript exporter fails
on most models (https://github.com/pytorch/pytorch/issues/154319). Both are therefore called without
it: the tagged graph is complete, and `htp_export.capabilities.functions.nesting.functions` turns
its modules into functions before the file is written.
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
from htp_export.exporter.export_arguments import ModulesAsFunctions
from htp_export.format import selectors
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.tagged import ModelSource, load

_log = logging.getLogger(__name__)

_MOST_LISTED = 5
"""Modules that a warning names, so that it stays readable."""


class ModuleFunctions:
    """The modules that become functions.

    Their names are checked if the modules of the model are known.

    Raises:
        InputError: If no module has one of the classes, or if ``wanted`` has another type.
        SelectorError: If a selector cannot be read or matches no module.
    """

    def __init__(self, wanted: ModulesAsFunctions, model: Any) -> None:
        self._every = wanted is True
        listed: Any = wanted
        if wanted is True:
            listed = ["**"]
        elif isinstance(wanted, str | type):
            listed = [wanted]
        if isinstance(listed, torch.nn.Module) or not isinstance(listed, Collection):
            raise _no_modules(listed)
        self._wanted: list[Any] = list(listed)
        for item in self._wanted:
            is_class = isinstance(item, type) and issubclass(item, torch.nn.Module)
            if not isinstance(item, str) and not is_class:
                raise _no_modules(item)
        if isinstance(model, torch.nn.Module):
            classes = Hierarchy.from_module(model).classes
            selectors.select(self._selector(classes), classes)

    def made_of(
        self, model: ModelSource, output: str | os.PathLike[str] | None = None, *, strict: bool
    ) -> Nested | None:
        """Build the functions.

        None if the graph is unchanged, as every module was wanted and none can be one.

        A model without tags is unchanged, too, unless ``strict``. Raises the errors of `functions`.
        """
        tagged = load(model)
        if not strict and tagged.source != "htp":
            _log.warning("no module is a function: the model was exported without module tags")
            return None
        try:
            nested = functions(tagged, self._selector(tagged.classes), output)
        except InputError as error:
            if not self._every or isinstance(error, UntaggedModelError):
                raise
            _log.warning("%s", error)
            return None
        # Users expect a function for a module with work, and none for a Dropout.
        problems: list[str] = []
        for path, reason in nested.skipped.items():
            if path and tagged.hierarchy[path].fate.does_work:
                problems.append(f"{path!r} is no function: {reason}")
        if problems:
            first, more = "; ".join(problems[:_MOST_LISTED]), len(problems) - _MOST_LISTED
            _log.warning("%s%s", first, f"; nor are {more} more modules" if more > 0 else "")
        return nested

    def _selector(self, classes: Mapping[str, str]) -> list[str]:
        """The wanted modules as a selector for modules of these classes."""
        return [
            item if isinstance(item, str) else f"class:{_class_among(item, classes)}"
            for item in self._wanted
        ]


def _no_modules(value: Any) -> InputError:
    name = type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)
    return InputError(
        f"export_modules_as_functions={name}: it takes True, classes of modules, or a selector "
        "such as 'encoder.layer.*' or 'class:LlamaDecoderLayer'"
    )


def _class_among(wanted: type, classes: Mapping[str, str]) -> str:
    """The name of a class in a model.

    Raises:
        InputError: No module has the class.
    """
    full, known = f"{wanted.__module__}.{wanted.__qualname__}", set(classes.values())
    for name in (full, wanted.__name__):  # scripted modules have the simple name only
        if name in known:
            return name
    simple = sorted({name.rpartition(".")[2] for name in known} - {""})
    nearest = difflib.get_close_matches(wanted.__name__, simple, n=3, cutoff=0.4) or simple[:3]
    listed = f"; nearest: {', '.join(map(repr, nearest))}" if nearest else ""
    raise InputError(f"export_modules_as_functions: no module has the class {full!r}{listed}")
