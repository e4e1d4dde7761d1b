"""How a tagged program of the dynamo exporter is saved: as torch saves it, but whole or not at all.

torch writes the weights first and the model afterwards, each over what is there. Between the two, an old model has new
weights, which loads and computes something that neither model does.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from htp_export.placing import written_whole

__all__ = ["save_whole"]


_MARK = "_htp_export_saves_whole"


def save_whole(program: Any) -> None:
    """Let ``program.save`` write a model and its data together; `torch.onnx.export` saves by that method, too."""
    if not hasattr(type(program), _MARK):
        program.__class__ = _saved_whole(type(program))


@functools.cache
def _saved_whole(program_class: Any) -> Any:
    original = program_class.save

    @functools.wraps(original)
    def save(self: Any, destination: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(destination, str | os.PathLike):
            original(self, destination, *args, **kwargs)
            return
        with written_whole(destination) as new:
            original(self, new, *args, **kwargs)

    described = {"__doc__": program_class.__doc__, "__module__": program_class.__module__, "save": save, _MARK: True}
    return type(program_class.__name__, (program_class,), described)
