"""The nodes that OpenVINO times, with the original nodes that were merged into them."""

from __future__ import annotations

from collections.abc import Sequence

from htp_export.capabilities.profile.engine_entries import Entry, entry_kernels
from htp_export.capabilities.profile.kernels import Kernel, Timed
from htp_export.capabilities.profile.openvino_session import EngineNode
from htp_export.model.tagged import TaggedModel

__all__ = ["openvino_kernels"]


def openvino_kernels(nodes: Sequence[EngineNode], device: str, tagged: TaggedModel) -> tuple[Kernel, ...]:
    """Return the nodes that take time, with their owners.

    Args:
        nodes: The graph that OpenVINO runs, constants and fused nodes included.
        device: The device that it runs on.
        tagged: The original model, without functions.
    """
    entries = [
        Entry(Timed(node.label, node.kind, device, node.ms or 0.0, 1.0), node.nodes, node.inputs, (node.name,))
        for node in nodes
    ]
    kernels = entry_kernels(entries, tagged)
    return tuple(kernel for kernel, node in zip(kernels, nodes, strict=True) if node.ms)
