"""Padding with zeros, folded into the following convolution."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import constant_array, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.symbolic import Symbolic


@register("fuse_pad_into_conv", level="tolerant")
class FusePadIntoConv(NodePass):
    """Lets a convolution pad its input itself."""

    operators = ("Conv",)

    def rewrite(self, node: ir.Node) -> bool:
        pad = producer_of(node.inputs[0], "Pad")
        return pad is not None and only_consumer(pad.outputs[0]) is not None and _fuse(pad, node, self.known)


def _fuse(pad: ir.Node, conv: ir.Node, known: Symbolic) -> bool:
    pads = known.constant(pad.inputs[1]) if len(pad.inputs) > 1 else None
    rank = known.rank(pad.inputs[0])
    if pads is None or rank is None or len(pads) != 2 * rank or min(pads) < 0:
        return False
    if pad.attributes.get_string("mode", "constant") != "constant" or not _is_zero(pad):
        return False
    if any(pads[axis] or pads[axis + rank] for axis in (0, 1)):
        return False
    auto = conv.attributes.get_string("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID"):
        return False
    spatial = rank - 2
    conv_pads = conv.attributes.get_ints("pads") if auto == "NOTSET" else None
    conv_pads = conv_pads or [0] * (2 * spatial)
    extra = [*pads[2:rank], *pads[rank + 2 :]]
    attributes: dict[str, ir.Attr | list[int]] = {k: v for k, v in conv.attributes.items() if k != "auto_pad"}
    attributes["pads"] = [a + b for a, b in zip(conv_pads, extra, strict=True)]
    replace(conv, [ir.node("Conv", [pad.inputs[0], *conv.inputs[1:]], attributes)])
    return True


def _is_zero(pad: ir.Node) -> bool:
    if len(pad.inputs) > 3 and pad.inputs[3] is not None:
        return False
    if len(pad.inputs) < 3 or pad.inputs[2] is None:
        return True
    fill = constant_array(pad.inputs[2], 1)
    return fill is not None and not fill.any()
