"""Stages as a Ray Serve application: its program, ``application.py``, and its configuration."""

from __future__ import annotations

from pathlib import Path

import yaml

from htp_export.capabilities.partition.partitions import Partition
from htp_export.errors import InputError
from htp_export_plugins.ray.application import deployments

__all__ = ["write_stages"]

_WHOLE_NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_TYPES = frozenset(("FLOAT", "FLOAT16", "DOUBLE", "BOOL", "STRING", *_WHOLE_NUMBERS))
"""Types that ONNX Runtime returns as numpy arrays, which Ray can send."""


def write_stages(partition: Partition, folder: Path) -> Partition:
    """Write ``serve_app.py`` and ``serve.yaml`` into the folder of written stages.

    The program is the same for every model: it reads the manifest. The configuration has a
    deployment for each stage: its replicas, their resources, and the period of health checks.

    Returns:
        The unchanged stages.

    Raises:
        InputError: A tensor between stages has a type that numpy does not have.
    """
    for number, stage in enumerate(partition.stages):
        for name, tensor in (*stage.inputs.items(), *stage.outputs.items()):
            if tensor.type is not None and tensor.type not in _TYPES:
                raise InputError(
                    f"stage {number}: tensor {name!r} is {tensor}, which numpy arrays cannot carry"
                )
    program = Path(__file__).with_name("application.py").read_text(encoding="utf-8")
    (folder / "serve_app.py").write_text(program, encoding="utf-8", newline="\n")
    (folder / "serve.yaml").write_text(
        _configuration(len(partition.stages)), encoding="utf-8", newline="\n"
    )
    return partition


def _configuration(stages: int) -> str:
    """The text of ``serve.yaml``."""
    listed = [{"name": name, **options} for name, options in deployments(stages).items()]
    application = {
        "name": "stages",
        "route_prefix": "/",
        "import_path": "serve_app:build",
        "args": {},
    }
    content = {"applications": [{**application, "deployments": listed}]}
    text = yaml.safe_dump(content, sort_keys=False)
    return f"# Start in this folder: serve run serve.yaml\n{text}"
