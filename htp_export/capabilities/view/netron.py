"""Netron's sidecar: metadata and metrics of nodes, in a JSON file that is dropped onto the open model.

Netron reads ``{"signature": "netron:attachment", "metadata": […], "metrics": […]}``, each entry with ``kind``,
``target``, ``name`` and ``value`` (``metadata.Attachment`` in its ``view.js``). It finds nodes by their names up to the
first line break, so that nodes without a name of their own are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from htp_export.capabilities.view.inventory import Inventory
from htp_export.capabilities.view.measures import Measure, spread
from htp_export.results.columns import number_text


def netron_attachment(inventory: Inventory, measures: Sequence[Measure] = ()) -> dict[str, Any]:
    """The sidecar of a model; the metrics of a node are the measures, with the numbers of its module beside them."""
    times = Counter(node.name for node in inventory.nodes)
    named = [
        (position, node)
        for position, node in enumerate(inventory.nodes)
        if node.name and times[node.name] == 1 and "\n" not in node.name
    ]
    metadata, metrics = [], []
    for _, node in named:
        owner = inventory.modules.get(node.owners[0]) if len(node.owners) == 1 else None
        facts = {
            "module": (node.module or "(root)") if node.owners else "",
            "class": owner.simple_class if owner else "",
            "owners": ", ".join(path or "(root)" for path in node.owners) if len(node.owners) > 1 else "",
            "call": node.call,
            "source": f"{node.source.file.rpartition('/')[2]}:{node.source.line}" if node.source else "",
        }
        facts |= {measure.title: measure.words.get(node.module, "") for measure in measures if measure.named}
        metadata += [_entry("node", node.name, name, value) for name, value in facts.items() if value]
    for measure in measures:
        values = spread(measure, inventory)
        for position, node in named:
            value = values[position]
            if value is not None:
                metrics.append(_entry("node", node.name, measure.title, number_text(value, measure.unit)))
            total = measure.total.get(node.module)
            if total is not None and measure.additive and math.isfinite(total):
                text = number_text(total, measure.unit)
                metrics.append(_entry("node", node.name, f"{measure.title} of the module", text))
        model_total = measure.total.get("")
        if model_total is not None:
            metrics.append(_entry("model", "", measure.title, number_text(model_total, measure.unit)))
    return {"signature": "netron:attachment", "metadata": metadata, "metrics": metrics}


def _entry(kind: str, target: str, name: str, value: str) -> dict[str, str]:
    return {"kind": kind, "target": target, "name": name, "value": value}
