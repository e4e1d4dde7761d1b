"""Factories that a user names, ``package.module:factory``: functions of his own code, called without arguments."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from htp_export.errors import ModelSourceError
from htp_export.process.user_code import user_code


def names_factory(text: object) -> bool:
    """Whether a text names a factory, and no file or folder.

    Examples:
        >>> names_factory("mypackage.data:runs"), names_factory("runs.npz"), names_factory("calibration/")
        (True, False, False)
    """
    if not isinstance(text, str) or ":" not in text or "\0" in text or text.endswith(".npz"):
        return False
    return not (os.path.isabs(text) or os.path.exists(text))  # noqa: PTH110, PTH117 - a text need be no path


def factory_file(text: object) -> Path | None:
    """The file of the module in ``package.module:factory``, which is not imported; None for other words."""
    if not names_factory(text):
        return None
    module = Path(*str(text).partition(":")[0].split("."))
    files = (Path(f"{module}.py"), module / "__init__.py")
    places = (folder / file for folder in map(Path, ("", *sys.path)) for file in files)
    return next((file for file in places if file.is_file()), None)


def call_factory(entry: str, seed: int = 0) -> Any:
    """What ``package.module:factory`` returns. The current folder is looked in first.

    Torch's generator starts from the seed while the factory runs, and is as it was afterwards.

    Raises:
        ModelSourceError: If there is no such factory.
        UserCodeError: If it raises.
    """
    import torch

    module_name, colon, attribute = entry.partition(":")
    if not (colon and module_name and attribute):
        raise ModelSourceError(entry, "an entry is package.module:factory")
    if module_name.endswith(".py"):
        name = ".".join(Path(module_name).with_suffix("").parts)
        raise ModelSourceError(entry, f"an entry names a module, not its file: {name}:{attribute}")
    folder = os.fspath(Path.cwd())
    sys.path.insert(0, folder)
    try:
        with user_code(entry):
            module = importlib.import_module(module_name)
            factory = getattr(module, attribute, None)
            if not callable(factory):
                raise ModelSourceError(entry, f"module {module_name!r} has no function {attribute!r}")
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return factory()
    finally:
        sys.path.remove(folder)
