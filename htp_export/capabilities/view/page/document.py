r"""The HTML file: a template, its styles and scripts, and data, put together so that no name in it can act.

Data stands in ``<script type="application/json">``, with every ``<`` written as ``\u003c``; the
scripts put text into the page as text. The policy of the page forbids all requests, and all scripts
but its own, which it names by their hashes, and those that these make (``blob:``, for the frame of
Model Explorer).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shlex
from collections.abc import Hashable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.view.inventory import Inventory, ModuleEntry, NodeEntry, TensorEntry
from htp_export.capabilities.view.measures import Measure, spread
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.reporting.command_words import in_both
from htp_export.reporting.folding import likeness, repeats
from htp_export.reporting.tables import drawn_parents
from htp_export.reporting.tag_facts import TagFacts, evidence_of

if TYPE_CHECKING:
    from htp_export.capabilities.search.search_results import Search, Trial


SCRIPTS = (
    *(
        "sizes.js",
        "reasons.js",
        "model.js",
        "colours.js",
        "search.js",
        "table.js",
        "details.js",
        "map.js",
    ),
    *("layers.js", "follow.js", "graph.js", "front.js", "explorer.js", "main.js"),
)
"""The scripts of the page of a model, in the order in which they run."""

_DATA_URLS = "img-src data: blob:; font-src data: blob:; media-src 'none'"


def document(
    title: str,
    data: Mapping[str, Any],
    packed: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    template: str = "page.html",
    style: Sequence[str] = ("page.css",),
    scripts: Sequence[str] = SCRIPTS,
) -> str:
    """A whole HTML document, made of one of the package's templates with style sheets and scripts.

    The scripts read ``data`` and, by ``id``, ``more``, which are plain data; they unpack
    ``packed``, in base64.
    """
    sources = [f"\n{asset(name)}" for name in scripts]
    hashes = " ".join(f"'sha256-{_hash(source)}'" for source in sources)
    policy = (
        f"default-src 'none'; script-src {hashes} blob:; worker-src blob:; style-src 'unsafe-inline' blob:; "
        f"{_DATA_URLS}; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": "\n" + "\n".join(map(asset, style)),
        "data": as_script_text(data),
        "more": "\n".join(
            [
                f'<script type="{kind}" id="{identifier}">{text}</script>'
                for kind, texts in (
                    (
                        "application/json",
                        {name: as_script_text(value) for name, value in (more or {}).items()},
                    ),
                    ("application/octet-stream", packed or {}),
                )
                for identifier, text in texts.items()
            ]
        ),
        "scripts": "\n".join(f"<script>{source}</script>" for source in sources),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place.group(1)], asset(template))


def asset(name: str) -> str:
    """A file of the page, as it lies in the package."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def as_script_text(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


# statistics that are written with four digits; the others are counts
_DIGITS = ("mean", "std", "least", "most")


def page_data(
    inventory: Inventory,
    measures: Sequence[Measure] = (),
    missing_explorer: str = "",
    file: str = "",
) -> dict[str, Any]:
    """The data of one graph of a page, in which measures are columns besides those that every page has.

    Modules that hold others and never ran themselves are left out: their names stand before those
    of what they hold. ``missing_explorer`` says why Model Explorer is not in the page; it is empty
    where it is. ``file`` is the name that the user gave, for commands to copy.
    """
    above = drawn_parents(inventory.modules)
    place = {path: position for position, path in enumerate(above)}
    modules = [inventory.modules[path] for path in above]
    named = f"./{file}" if file.startswith("-") else file if file.isprintable() else ""
    return {
        "name": inventory.name,
        "file": named,
        "offer": _offer(inventory, measures, named),
        "facts": _facts(inventory),
        "tags": tags_data(inventory.tags),
        "advice": [in_both(text) for text in (inventory.tags.advice, *inventory.notes) if text],
        "failures": _failures(inventory),
        "inputs": _tensors(inventory.inputs),
        "outputs": _tensors(inventory.outputs),
        "count": len(inventory.modules),
        "fates": {
            fate: {"meaning": fate.meaning, "tone": fate.tone, "remark": fate.remark}
            for fate in Fate
        },
        "modules": [
            _module(module, None if (parent := above[module.path]) is None else place[parent])
            for module in modules
        ],
        "nodes": [_node(node) for node in inventory.nodes],
        "types": {tensor.name: tensor.type for tensor in _given(inventory, modules) if tensor.type},
        "values": {tensor.name: tensor.value for tensor in inventory.constants if tensor.value},
        "statistics": {
            name: {
                key: float(f"{value:.4g}") if key in _DIGITS else value
                for key, value in vars(statistics).items()
            }
            for name, statistics in inventory.statistics.items()
        },
        "repeats": [[place[path] for path in run] for run in _repeats(above, inventory, measures)],
        "measures": [_measure(measure, list(above), inventory) for measure in measures],
        "missing_explorer": in_both(missing_explorer),
    }


def _offer(inventory: Inventory, measures: Sequence[Measure], file: str) -> str:
    """The command that measures the times that are not among the measures; ``""`` where there is none."""
    if (
        not file
        or inventory.tags.source == "none"
        or any(measure.key == "total_ms" for measure in measures)
    ):
        return ""
    return shlex.join(["htp-export", "view", file, "--measure", "time,cost"])


def tags_data(facts: TagFacts) -> dict[str, Any]:
    """What a page says of the module tags of a file, in the words of the command line."""
    return {
        "source": facts.source,
        "headline": facts.headline,
        "untagged": facts.untagged,
        "evidence": _evidence(facts.reasons),
    }


def _evidence(reasons: Mapping[str, int]) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(entry.text, entry.nodes, entry.reasons) for entry in evidence_of(reasons)]


def _repeats(
    above: Mapping[str, str | None], inventory: Inventory, measures: Sequence[Measure]
) -> list[list[str]]:
    """Alike siblings, as the tree in the terminal draws them once."""
    flops = next((measure.total for measure in measures if measure.key == "flops"), {})
    words = [measure.words for measure in measures if measure.words]

    def alike(path: str) -> Hashable:
        module = inventory.modules[path]
        text = "; ".join(texts.get(path, "") for texts in words)
        fate = module.failure or module.fate
        return likeness(
            module.class_name,
            module.calls,
            fate,
            module.nodes,
            module.parameters,
            flops.get(path),
            text,
        )

    return repeats(above, alike)


def _failures(inventory: Inventory) -> list[str]:
    """What failed, without the modules that failed because of one below them."""
    failed = {path: module.failure for path, module in inventory.modules.items() if module.failure}
    holding = tags.all_above(failed)
    return [
        f"{path or '(root)'}: {in_both(failure)}"
        for path, failure in failed.items()
        if path not in holding
    ][:5]


def _facts(inventory: Inventory) -> list[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in inventory.opsets.items())
    external = "external data" if inventory.external_data else ""
    return [
        fact for fact in (inventory.producer, f"opset {opsets}" if opsets else "", external) if fact
    ]


def _given(inventory: Inventory, modules: Sequence[ModuleEntry]) -> list[TensorEntry]:
    weights = [tensor for module in modules for tensor in module.weights]
    return [*inventory.inputs, *inventory.constants, *weights]


def _module(module: ModuleEntry, parent: int | None) -> dict[str, Any]:
    return {
        "path": module.path,
        "class": module.class_name,
        "calls": module.calls,
        "fate": module.fate,
        "with": list(module.fused_with),
        "parent": parent,
        "nodes": module.nodes,
        "own": list(module.own_nodes),
        "shared": module.reasons.get("shared", 0),
        "fused": module.reasons.get("fused", 0),
        "parameters": module.parameters,
        "bytes": module.weight_bytes,
        "operators": dict(module.operators),
        "evidence": _evidence(module.reasons),
        "weights": _tensors(module.weights),
        "inputs": _tensors(module.inputs),
        "outputs": _tensors(module.outputs),
        "tied": dict(module.tied),
        "counted": [module.counted_parameters, module.counted_bytes],
        "source": module.source,
        "failure": module.failure,
    }


def _node(node: NodeEntry) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.operator,
        "owners": list(node.owners),
        "reason": node.reason,
        "call": node.call,
        **({"parameters": node.parameters} if node.parameters else {}),
        "inputs": [(link.tensor, link.node) for link in node.inputs if link.tensor],
        "outputs": _tensors(node.outputs),
        "attributes": dict(node.attributes),
        "source": node.source,
    }


def _tensors(tensors: Sequence[TensorEntry]) -> list[tuple[str, str]]:
    return [(tensor.name, tensor.type) for tensor in tensors]


def _measure(measure: Measure, paths: Sequence[str], inventory: Inventory) -> dict[str, Any]:
    by_node = (
        spread(measure, inventory) if measure.additive and (measure.main or measure.nodes) else []
    )
    said = [position for position, node in enumerate(inventory.nodes) if node.name in measure.nodes]
    return {
        "key": measure.key,
        "title": measure.title,
        "unit": measure.unit,
        "additive": measure.additive,
        "main": measure.main,
        "named": measure.named,
        "total": [_number(measure.total, path) for path in paths],
        "own": [_number(measure.own, path) for path in paths],
        "nodes": [None if value is None else float(f"{value:.6g}") for value in by_node],
        "said": True if len(said) == len(inventory.nodes) else said,
        "words": {
            position: measure.words[path]
            for position, path in enumerate(paths)
            if path in measure.words
        },
    }


def _number(values: Mapping[str, float], path: str) -> float | str | None:
    """A value; in words where it is one that JSON has no sign for."""
    value = values.get(path)
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def front_data(search: Search) -> dict[str, Any]:
    """The data of a search: its picture, its front, and the plan of each point.

    With one objective, or without finite values, it has no picture.
    """
    from htp_export.capabilities.search.front_files import front_svg, plan_file

    front = [
        next(place for place, other in enumerate(search.trials) if other is trial)
        for trial in search.pareto
    ]
    files = {place: plan_file(number, search.trials[place]) for number, place in enumerate(front)}
    try:
        picture = front_svg(search)
    except InputError:
        picture = ""
    return {
        "summary": search.summary,
        "objectives": list(search.objectives),
        "svg": picture,
        "front": front,
        "trials": [
            _trial(trial, search, files.get(place, "")) for place, trial in enumerate(search.trials)
        ],
    }


def _trial(trial: Trial, search: Search, file: str) -> dict[str, Any]:
    from htp_export.capabilities.search.search_results import trial_columns

    texts = {column.name: column.text or str for column in trial_columns(search.objectives)}
    return {
        "name": trial.name,
        "file": file,
        "values": [texts[name](trial.values[name]) for name in search.objectives],
        "origin": trial.origin,
        "precisions": trial.counted,
        "plan": [
            (selector or "(root)", ", ".join([chosen, *_fields(trial.plan.get(selector))]))
            for selector, chosen in trial.choices.items()
        ],
    }


def _fields(precision: object) -> list[str]:
    """The fields of a precision that differ, in words."""
    if not isinstance(precision, Mapping):
        return []
    return [f"{name} {value}" for name, value in precision.items() if name != "precision"]
