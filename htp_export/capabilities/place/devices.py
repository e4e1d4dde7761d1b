"""Devices by ONNX Runtime's words for layer assignment, and session options for them.

A node with the text ``layer_ann`` in its metadata is offered to the first execution provider for
which the session's ``session.layer_assignment_settings`` lists that text, ``gpu(=gpu);
CPUExecutionProvider(=cpu)``, and to others if that one has no kernel. Without ``=``, a prefix of
the text is enough (onnxruntime/core/framework/layering_annotations.cc).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from htp_export.errors import InputError, in_one_line
from htp_export.extras import required
from htp_export.runtime.settings import HOST

ANNOTATION = "layer_ann"
"""Key in the metadata of a node."""

SETTINGS = "session.layer_assignment_settings"
"""Session configuration entry. Older versions of ONNX Runtime accept and ignore it."""

_HONOURED_SINCE = (1, 25)  # the first version of ONNX Runtime that uses the entry

_KINDS = ("cpu", "gpu", "cuda", "dml", "npu", "fpga", "accelerator")
_ONE_GPU = re.compile(r"gpu:(\d+|[a-z]+)")
_PROVIDER = "ExecutionProvider"
_UNWRITABLE = frozenset("(),;=: ")


def device_named(word: str) -> str:
    """The device of a word: one of ``_KINDS``, ``gpu:1``, ``gpu:nvidia``, or an execution provider.

    ``OpenVINOExecutionProvider`` may be ``openvino``; the provider of a plugin has its own name.

    Raises:
        InputError: There is no such device.
    """
    onnxruntime = required("onnxruntime")

    text = word.strip() if isinstance(word, str) else ""
    lower = text.lower()
    if lower in _KINDS or _ONE_GPU.fullmatch(lower):
        return lower
    plugins = {device.ep_name for device in getattr(onnxruntime, "get_ep_devices", list)()}
    known = [*plugins, *onnxruntime.get_all_providers()]
    for name in known:
        if lower in (name.lower(), name.lower().removesuffix(_PROVIDER.lower())):
            return str(name)
    if text.endswith(_PROVIDER) and _UNWRITABLE.isdisjoint(text):
        return text  # a provider of another build of ONNX Runtime
    names = sorted({name.removesuffix(_PROVIDER).lower() for name in known})
    raise InputError(
        f"there is no device {word!r}; write {', '.join(_KINDS)}, gpu:INDEX, gpu:VENDOR, or an execution provider: "
        f"{', '.join(names)}"
    )


def assignment_settings(devices: Iterable[str]) -> str:
    """The value of ``session.layer_assignment_settings`` for nodes annotated with their devices.

    For ``cpu``, it names ``CPUExecutionProvider``: to ONNX Runtime, the word ``cpu`` is the first
    provider of the session whose device is a CPU, which may be that of OpenVINO, QNN or XNNPACK.
    """
    entries = []
    for device in devices:
        provider = HOST if device == "cpu" else device
        entries.append(f"{provider}(={device})")
    return "; ".join(entries)


def is_device(device: str, provider: str) -> bool:
    """Whether a provider may be the device; ONNX Runtime does not distinguish several GPUs."""
    kind = device.partition(":")[0]
    if kind in _KINDS:
        return (kind == "cpu") == (provider == HOST)
    return provider == device


def check_honoured() -> None:
    """Raise an `InputError` if this version of ONNX Runtime ignores the devices of nodes."""
    onnxruntime = required("onnxruntime")

    parts = re.findall(r"\d+", onnxruntime.__version__)
    if tuple(int(part) for part in parts[:2]) < _HONOURED_SINCE:
        raise InputError(
            f"ONNX Runtime {onnxruntime.__version__} ignores the devices of nodes; it needs "
            f"{'.'.join(map(str, _HONOURED_SINCE))} or later"
        )


def session_options_with(entries: Mapping[str, str], options: Any = None) -> Any:
    """Session options with entries for layer assignment.

    Raises:
        InputError: ONNX Runtime refuses or ignores them.
    """
    check_honoured()
    return with_entries(entries, options)


def with_entries(entries: Mapping[str, str], options: Any = None) -> Any:
    """Session options with configuration entries.

    Raises:
        InputError: ONNX Runtime refuses an entry, such as a very long text.
    """
    onnxruntime = required("onnxruntime")

    options = onnxruntime.SessionOptions() if options is None else options
    for name, value in entries.items():
        try:
            options.add_session_config_entry(name, value)
        except (RuntimeError, TypeError, ValueError) as error:
            problem = f"the entry {name!r}, of {len(value):,} characters: {in_one_line(error)}"
            raise InputError(f"ONNX Runtime does not accept {problem}") from error
    return options
