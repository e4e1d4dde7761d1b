"""TensorRT's ``trtexec``: options of its command line.

``--layerPrecisions`` and ``--layerOutputTypes`` are read from left to right, ``*`` stands for all layers that no other
entry names, and a name may stand in single quotes (``trtexec --help``; ``samples/common/sampleOptions.cpp``). The
parser of ONNX gives a layer the name of its node.
"""

from __future__ import annotations

import onnx_ir as ir

from htp_export.compress.plan_export.planned import PlannedModel, TargetFile
from htp_export.compress.quantization.precisions import Method, Precision
from htp_export.errors import InputError

__all__ = ["plan_file"]

_WORDS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int8": "int8"}


def plan_file(planned: PlannedModel) -> TargetFile:
    """The options, one in a line."""
    planned.check_methods("trtexec", (Method.CAST, Method.KEEP, Method.STATIC))
    precisions, outputs, used = ["*:fp32"], ["*:fp32"], {"fp32"}
    for precision, nodes in planned.of(Method.CAST, Method.KEEP, Method.STATIC).items():
        word = _word(precision)
        for node in nodes:
            floats = planned.float_outputs[node]
            if not any(floats) or node.op_type == "Constant":  # TensorRT refuses a float type for sizes and indices
                continue
            used.add(word)
            precisions.append(f"{_quoted(node)}:{word}")
            if all(floats) and word != "int8":  # TensorRT chooses where integers become floats again
                outputs.append(f"{_quoted(node)}:{'+'.join([word] * len(floats))}")
    lines = [
        *(f"--{word}" for word in ("fp16", "bf16", "int8") if word in used),
        "--precisionConstraints=obey",
        f"--layerPrecisions={','.join(precisions)}",
        f"--layerOutputTypes={','.join(outputs)}",
    ]
    notes = ["trtexec --onnx=MODEL $(cat FILE)"]
    if "int8" in used:
        notes.append("without --calib=CACHE, TensorRT takes placeholder ranges for int8, which are for timing only")
    return TargetFile("\n".join(lines) + "\n", (*notes, *planned.subgraph_notes()))


def _word(precision: Precision) -> str:
    word = _WORDS.get(precision.weight)
    if word is None or precision.activation != precision.weight:
        raise InputError(f"trtexec has no precision {precision}; it has {', '.join(_WORDS.values())}")
    return word


def _quoted(node: ir.Node) -> str:
    """The name of a layer; in quotes where it has a character that separates entries."""
    name = str(node.name)
    if "'" in name or any(character.isspace() for character in name):
        raise InputError(f"trtexec cannot read the name of node {name!r}: it has a quote or a space")
    return f"'{name}'" if set(name) & set(",:+*") else name
