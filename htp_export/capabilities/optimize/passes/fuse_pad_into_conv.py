"""Padding with zeros, folded into the following convolution."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, register
from htp_export.editing.editing import constant_array, replace
from htp_export.model.neighbours import only_consumer, producer_of


@register("fuse_pad_into_conv", level="tolerant")
class FusePadIntoConv(NodePass):
    """Folds ``Pad`` with zeros into the padding of the convolution after it."""

    operators = ("Conv",)

    def rewrite(self, node: ir.Node) -> bool:
        pad = producer_of(node.inputs[0], "Pad")
        auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
        if pad is None or only_consumer(pad.outputs[0]) is None:
            return False
        if auto_pad not in ("NOTSET", "VALID"):
            return False
        pads = self.known.constant(pad.inputs[1]) if len(pad.inputs) > 1 else None
        rank = self.known.rank(pad.inputs[0])
        if pads is None or rank is None or len(pads) != 2 * rank or min(pads) < 0:
            return False
        pads_channels = any(pads[axis] or pads[axis + rank] for axis in (0, 1))
        if pads_channels or not _is_zero(pad):
            return False
        own = node.attributes.get_ints("pads") if auto_pad == "NOTSET" else None
        own = own or [0] * (2 * rank - 4)
        added = (*pads[2:rank], *pads[rank + 2 :])
        attributes: dict[str, ir.Attr | list[int]] = dict(node.attributes)
        attributes.pop("auto_pad", None)
        attributes["pads"] = [a + b for a, b in zip(own, added, strict=True)]
        replace(node, [ir.node("Conv", [pad.inputs[0], *node.inputs[1:]], attributes)])
        return True


def _is_zero(pad: ir.Node) -> bool:
    """Whether a ``Pad`` adds zeros, and has pads for all dimensions in order."""
    if pad.attributes.get_string("mode", "constant") != "constant" or any(pad.inputs[3:]):
        return False
    if len(pad.inputs) < 3 or pad.inputs[2] is None:
        return True
    fill = constant_array(pad.inputs[2], 1)
    return fill is not None and not fill.any()
