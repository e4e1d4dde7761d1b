"""Packages that htp_export does not install by itself: each belongs to an extra.

ONNX Runtime is one of them, since its builds (``onnxruntime``, ``onnxruntime-gpu``,
``onnxruntime-qnn``, ...) overwrite the files of each other: the user installs one, and any build
that can be imported will do.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from htp_export.errors import InputError, first_line

__all__ = ["install_advice", "is_installed", "required"]

_EXTRA_OF = {
    "gguf": "gguf",
    "nncf": "nncf",
    "model_explorer": "view",
    "onnxoptimizer": "tools",
    "onnxruntime": "ort",
    "onnxsim": "tools",
    "onnxslim": "tools",
    "openvino": "openvino",
    "optuna": "compress",
    "peft": "lora",
    "transformers": "transformers",
}
"""Package → the extra that installs it; a package without an extra is installed by its own name."""

_NOTES = {"onnxruntime": " (or with [ort-gpu], or install another build of ONNX Runtime)"}


def is_installed(package: str) -> bool:
    """Return whether a package can be found; it is not imported.

    Examples:
        >>> is_installed("numpy"), is_installed("no_such_package")
        (True, False)
    """
    return find_spec(package) is not None


def required(module: str, purpose: str = "this") -> Any:
    """Import a package that an extra installs, or a module of it.

    Args:
        module: Its name, such as ``"onnxruntime"`` or ``"onnxruntime.quantization"``.
        purpose: The function or file that needs it: the first words of the message of an error.

    Raises:
        InputError: If the package is not installed, with the command that installs it; or if it is
            installed, and importing it fails, with the reason.

    Examples:
        >>> required("numpy").__name__
        'numpy'
        >>> required("tomorrow", "the forecast")
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: the forecast needs tomorrow; install it with: pip install tomorrow
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # the package itself is missing, or hidden, and not a dependency of it
        if str(error.name).partition(".")[0] == package:
            raise InputError(f"{purpose} needs {package}; {install_advice(package)}") from error
        raise InputError(
            f"{purpose} needs {module}, which cannot be imported: {first_line(error)}"
        ) from error


def install_advice(package: str) -> str:
    """Return the command that installs a package, as the end of a message.

    Examples:
        >>> install_advice("peft")
        'install it with: pip install "htp-export[lora]"'
    """
    if package not in _EXTRA_OF:
        return f"install it with: pip install {package}"
    command = f'pip install "htp-export[{_EXTRA_OF[package]}]"'
    return f"install it with: {command}{_NOTES.get(package, '')}"
