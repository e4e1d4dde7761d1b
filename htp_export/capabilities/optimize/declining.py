"""Why a pass leaves nodes unchanged that look like its work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

_KEY = "htp_export.declined"  # in a node's ``meta``, never in files


@dataclass(frozen=True)
class Declined:
    """Nodes that a pass leaves as they are.

    Attributes:
        kind: A key of `htp_export.capabilities.forensics.finding.KINDS`, or the name of the pass.
        nodes: The nodes.
        why: Why they stay.
        detail: Details of these nodes.
    """

    kind: str
    nodes: tuple[ir.Node, ...]
    why: str = ""
    detail: str = ""


def decline(kind: str, nodes: Sequence[ir.Node], why: str) -> Literal[False]:
    """Note on the last of some nodes why a pass leaves them unchanged; `htp_export.forensics` reports it.

    False: so a `NodePass` says that it changed nothing.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> decline("conv_relu", [relu], "other nodes read the result of the Conv")
        False
        >>> [(each.kind, each.why) for each in declined([relu])]
        [('conv_relu', 'other nodes read the result of the Conv')]
    """
    nodes[-1].meta.setdefault(_KEY, {})[kind] = Declined(kind, tuple(nodes), why)
    return False


def declined(nodes: Sequence[ir.Node]) -> Iterator[Declined]:
    """The notes of passes on nodes."""
    for node in nodes:
        yield from node.meta.get(_KEY, {}).values()
