"""``Relu``, fused into the convolution before it."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, decline, register
from htp_export.editing.editing import replace
from htp_export.model.neighbours import only_consumer, producer_of

_DOMAIN = "com.microsoft"


@register("fuse_conv_relu", level="fused")
class FuseConvRelu(NodePass):
    """Fuses a convolution and a ``Relu`` into ONNX Runtime's ``FusedConv``."""

    operators = ("Relu",)

    def rewrite(self, node: ir.Node) -> bool:
        conv = producer_of(node.inputs[0], "Conv")
        if conv is None:
            return False
        if only_consumer(conv.outputs[0]) is None:
            return decline("conv_relu", [conv, node], "other nodes use the result of the Conv")
        attributes = {**conv.attributes, "activation": ir.AttrString("activation", "Relu")}
        replace(node, [ir.node("FusedConv", conv.inputs, attributes, domain=_DOMAIN)])
        self.graph.opset_imports.setdefault(_DOMAIN, 1)
        return True
