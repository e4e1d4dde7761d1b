"""The output of an export: no messages of torch about itself, and a module tree in notebooks.

`htp_export.export` prints nothing unless the user asks for it: torch's progress lines would fill a
cell, and two of its messages are about torch itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
from collections.abc import Mapping
from typing import Any

from htp_export.process.restoring import Changes

_REGISTRATION = "torch.onnx._internal.exporter._registration"
_MISSING = "torchvision is not installed"
_LEAF_SPEC = r"`isinstance\(treespec, LeafSpec\)` is deprecated"


def hide_messages(changes: Changes) -> None:
    """Hide torch's messages that no user can act on, until the changes are undone.

    It logs each operator of torchvision for which it has no translation without torchvision, and
    warns about its own use of ``LeafSpec``.
    """
    logger = logging.getLogger(_REGISTRATION)
    logger.addFilter(_is_actionable)
    changes.will_undo(functools.partial(logger.removeFilter, _is_actionable))
    # Not `warnings.catch_warnings`, which would also revert the filters that the model's code sets.
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=_LEAF_SPEC, category=FutureWarning)
    for added in [entry for entry in warnings.filters if entry not in before]:
        changes.will_undo(functools.partial(_remove_filter, added))


def show_tree_in_notebooks(program: Any) -> None:
    """Let notebooks show the module tree of a program, whose ``repr`` has a line for each node."""
    program._repr_mimebundle_ = types.MethodType(_mimebundle, program)


def _mimebundle(program: Any, **_: Any) -> Mapping[str, str]:
    from htp_export.model.tagged import load

    tagged = load(program)
    return {"text/plain": repr(tagged), "text/html": tagged._repr_html_()}


def _is_actionable(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MISSING)


def _remove_filter(entry: Any) -> None:
    with contextlib.suppress(ValueError):  # the user's code has reset the filters
        warnings.filters.remove(entry)  # type: ignore[attr-defined] # it is a list
