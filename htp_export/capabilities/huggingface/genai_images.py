"""``vision_processor.json``: how ONNX Runtime GenAI makes patches of images, as the image processor of Qwen2-VL does.

The file lists operators of onnxruntime-extensions, which GenAI contains (``shared/api/image_processor.cc`` and
``image_transforms.hpp`` in https://github.com/microsoft/onnxruntime-extensions). Its usual name is
``processor_config.json``, which transformers has for a file of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.configs import is_setting
from htp_export.capabilities.huggingface.processors import image_settings
from htp_export.errors import HtpExportError, InputError

VISION_PROCESSOR = "vision_processor.json"

_log = logging.getLogger(__name__)

_FILTERS = {0: "NEAREST", 1: "LANCZOS", 2: "LINEAR", 3: "CUBIC"}
"""Filter of Pillow → its name in onnxruntime-extensions."""

_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
}
"""What ``Qwen2VLImageProcessor`` of transformers has for settings that a file does not name."""


def vision_processor(folder: Path) -> dict[str, Any] | None:
    """The content of ``vision_processor.json`` for the image processor of a folder.

    None if the folder has none, or one whose work onnxruntime-extensions has no operators for: a warning says which
    setting it is.
    """
    problem = "the folder of the model has no preprocessor_config.json with a patch_size"
    try:
        for settings in image_settings(lambda name: file if (file := folder / name).is_file() else None):
            if "patch_size" in settings:
                return {"processor": {"name": "image_processor", "transforms": image_operators(settings)}}
    except HtpExportError as error:
        problem = str(error)
    _log.warning("GenAI's own image processor is not configured: %s; give it pixels that transformers made", problem)
    return None


def image_operators(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operators that make what an image processor with these settings makes, from the bytes of a file.

    Raises:
        InputError: If a setting is no number that it can be, or there is no operator for it.

    Examples:
        >>> [each["operation"]["type"] for each in image_operators({"patch_size": 14})]
        ['DecodeImage', 'Resize', 'Rescale', 'Normalize', 'PatchImage']
    """
    size = settings.get("size")
    sizes = size if isinstance(size, Mapping) else {}
    edges = {"min_pixels": sizes.get("shortest_edge"), "max_pixels": sizes.get("longest_edge")}
    layers = (settings, sizes, edges)

    def setting(name: str, kind: type) -> Any:
        found = next((layer[name] for layer in layers if layer.get(name) is not None), _DEFAULTS[name])
        if not is_setting(kind, found) or (kind is int and found == 0 and name != "resample"):
            raise InputError(f"its {name} is {found!r}")
        return found

    def of_channels(name: str) -> list[float]:
        found = settings.get(name, _DEFAULTS[name])
        if not isinstance(found, list) or len(found) != 3 or not all(is_setting(float, each) for each in found):
            raise InputError(f"its {name} is {found!r}, and not three numbers")
        return [float(each) for each in found]

    patches = {"patch_size": setting("patch_size", int), "merge_size": setting("merge_size", int)}
    steps: dict[str, dict[str, Any]] = {"DecodeImage": {"color_space": "RGB"}}
    if setting("do_resize", bool):
        resample = setting("resample", int)
        if resample not in _FILTERS:
            raise InputError(f"onnxruntime-extensions has no filter for its resample, {resample}")
        pixels = {name: setting(name, int) for name in ("min_pixels", "max_pixels")}
        steps["Resize"] = {"interpolation": _FILTERS[resample], "smart_resize": 1, **pixels, **patches}
    steps["Rescale"] = {"rescale_factor": float(setting("rescale_factor", float) if setting("do_rescale", bool) else 1)}
    if setting("do_normalize", bool):
        deviations = of_channels("image_std")
        if 0 in deviations:
            raise InputError(f"its image_std is {deviations}")
        steps["Normalize"] = {"mean": of_channels("image_mean"), "std": deviations}
    steps["PatchImage"] = {**patches, "temporal_patch_size": setting("temporal_patch_size", int)}
    return [{"operation": {"name": name, "type": name, "attrs": attrs}} for name, attrs in steps.items()]
