"""Models as they are drawn: flat, without functions."""

from __future__ import annotations

import logging

from htp_export.errors import InputError
from htp_export.surgery.flatten import inline
from htp_export.tagged import ModelSource, TaggedModel, load

__all__ = ["read_flat"]

_log = logging.getLogger(__name__)


def read_flat(source: ModelSource) -> TaggedModel:
    """A model whose functions are dissolved, each node in the module whose work it does; as it is where it has none.

    Args:
        source: Whatever ``load`` takes; a model in memory is not changed.

    Raises:
        InputError: If ``load`` cannot read it.
    """
    tagged = load(source)
    if not tagged.model.functions:
        return tagged
    try:
        return load(inline(tagged).model)
    except InputError as error:  # a function that calls itself, or has graphs as attributes: drawn as a single node
        _log.warning("functions are drawn apart from the nodes that call them: %s", error)
        return tagged
