"""The dynamo exporter of torch 2.10, which ends later than that of the releases after it.

From 2.11 on, ``_core.export`` converts the opset and optimizes, and its caller only saves what it returns, so the
tags are written when it returns. In 2.10 its caller, ``export_compat``, converts, optimizes and saves. The end of the
export is therefore the end of ``export_compat``, called without a file; what torch would have saved is saved here,
after the tags are written. To be deleted with the support of torch 2.10.
"""

from __future__ import annotations

import functools
import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

from htp_export.errors import HtpExportError

PLACE = ("torch.onnx._internal.exporter._compat", "export_compat")

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_late() -> bool:
    """Whether the installed torch optimizes and saves outside of ``_core.export``."""
    import torch

    return torch.torch_version.TorchVersion(torch.__version__) < "2.11"


def saving_after(tagged: Wrap, wanted: Callable[[], Any]) -> Wrap:
    """Make the wrapper of ``export_compat`` from that of ``_core.export``.

    Args:
        tagged: Makes, from an export that saves nothing, the same with tags.
        wanted: Whether tags are wanted in this thread; if not, nothing is changed.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        with_tags = tagged(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            try:
                program = with_tags(**{**options, "f": None, "fallback": False})
            except HtpExportError:
                raise
            except Exception:
                if not options["fallback"]:
                    raise
                # Fails once more, and writes the file with TorchScript, an export with tags of its own.
                return original(*args, **kwargs)
            if options["f"] is not None:
                _save(program, options)
            return program

        return wrapper

    return wrap


def _save(program: Any, options: dict[str, Any]) -> None:
    """Save a program as ``export_compat`` does."""
    import onnx

    if isinstance(options["f"], io.BytesIO):
        warnings.warn(
            "Saving ONNX model to a BytesIO object is deprecated. Please use a file path instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        onnx.save(program.model_proto, options["f"])
    else:
        kept = ("keep_initializers_as_inputs", "external_data")
        program.save(
            options["f"], include_initializers=options["export_params"], **{name: options[name] for name in kept}
        )
