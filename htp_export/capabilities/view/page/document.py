r"""The HTML file: template, styles, scripts and data, put together so that no name in it can act.

Data is inside ``<script type="application/json">``, with ``\u003c`` in place of every ``<``; the
scripts insert text as text. The policy of the page forbids all requests, and all scripts but its
own, listed by their hashes, and scripts that these create (``blob:``, for Model Explorer).
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

from htp_export.capabilities.view.inventory import (
    Inventory,
    ModuleEntry,
    NodeEntry,
    TensorEntry,
    WeightStatistics,
)
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
    *("base.js", "packed.js", "sizes.js", "reasons.js", "model.js", "colours.js", "search.js"),
    *("table.js", "details.js", "map.js", "layers.js", "drawing.js", "picture.js"),
    *("follow.js", "graph.js", "front.js", "explorer.js", "main.js"),
)
"""The scripts of the page of a model, in execution order."""

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
    """Build an HTML document from the template of its body, style sheets and scripts.

    The scripts read ``data`` and, by ``id``, ``more``, which are plain data; they unpack
    ``packed``, in base64.
    """
    sources = [f"\n{asset(name)}" for name in scripts]
    hashes = " ".join(f"'sha256-{_hash(source)}'" for source in sources)
    policy = (
        f"default-src 'none'; script-src {hashes} blob:; worker-src blob:; style-src 'unsafe-inline' blob:; "
        f"{_DATA_URLS}; form-action 'none'"
    )
    texts = {name: as_script_text(value) for name, value in (more or {}).items()}
    elements = [_data_element("application/json", name, text) for name, text in texts.items()]
    for name, text in (packed or {}).items():
        elements.append(_data_element("application/octet-stream", name, text))
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": "\n" + "\n".join(map(asset, style)),
        "data": as_script_text(data),
        "more": "\n".join(elements),
        "scripts": "\n".join(f"<script>{source}</script>" for source in sources),
    }
    text = asset("head.html") + asset(template) + asset("foot.html")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place.group(1)], text)


def served(page: str) -> str:
    """A page for a server of this machine, which may ask it for the values of tensors."""
    allowed = page.replace("default-src 'none'; ", "default-src 'none'; connect-src 'self'; ", 1)
    return allowed.replace("<html ", '<html data-served="yes" ', 1)


def _data_element(kind: str, identifier: str, text: str) -> str:
    return f'<script type="{kind}" id="{identifier}">{text}</script>'


def asset(name: str) -> str:
    """The text of a file of the page in the package."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def as_script_text(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


# Statistics that are written with four digits; the others are counts.
_DIGITS = ("mean", "std", "least", "most")


def page_data(
    inventory: Inventory,
    measures: Sequence[Measure] = (),
    missing_explorer: str = "",
    file: str = "",
) -> dict[str, Any]:
    """The data of one graph of a page; measures are additional columns.

    Containers that never ran themselves are omitted: their names are prefixes of their children's.
    ``missing_explorer`` is the reason why Model Explorer is not in the page; empty if it is.
    ``file`` is the name that the user passed, for commands to copy.
    """
    above = drawn_parents(inventory.modules)
    place = {path: position for position, path in enumerate(above)}
    modules = []
    typed = [*inventory.inputs, *inventory.constants]
    for path, parent in above.items():
        module = inventory.modules[path]
        modules.append(_module(module, None if parent is None else place[parent]))
        typed.extend(module.weights)
    repeated = _repeats(above, inventory, measures)
    argument = _as_argument(file)
    return {
        "name": inventory.name,
        "file": argument,
        "offer": _offer(inventory, measures, argument),
        "facts": _facts(inventory),
        "tags": tags_data(inventory.tags),
        "advice": [in_both(text) for text in (inventory.tags.advice, *inventory.notes) if text],
        "failures": _failures(inventory),
        "inputs": _tensors(inventory.inputs),
        "outputs": _tensors(inventory.outputs),
        "count": len(inventory.modules),
        "fates": {fate: _fate(fate) for fate in Fate},
        "modules": modules,
        "nodes": [_node(node) for node in inventory.nodes],
        "types": {tensor.name: tensor.type for tensor in typed if tensor.type},
        "recipes": dict(inventory.parameters),
        "values": {tensor.name: tensor.value for tensor in inventory.constants if tensor.value},
        "statistics": {name: _rounded(entry) for name, entry in inventory.statistics.items()},
        "repeats": repeated,
        "measures": [_measure(measure, list(above), inventory) for measure in measures],
        "missing_explorer": in_both(missing_explorer),
    }


def _fate(fate: Fate) -> dict[str, str]:
    return {"meaning": fate.meaning, "tone": fate.tone, "remark": fate.remark}


def _as_argument(file: str) -> str:
    """A file name as an argument of a command; empty if it cannot be typed."""
    if file.startswith("-"):
        return f"./{file}"
    return file if file.isprintable() else ""


def _rounded(statistics: WeightStatistics) -> dict[str, float]:
    entries = vars(statistics).items()
    return {key: float(f"{value:.4g}") if key in _DIGITS else value for key, value in entries}


def _offer(inventory: Inventory, measures: Sequence[Measure], file: str) -> str:
    """The command that measures the times that the page does not have; ``""`` if it has them."""
    has_times = any(measure.key == "total_ms" for measure in measures)
    if not file or has_times or inventory.tags.source == "none":
        return ""
    return shlex.join(["htp-export", "view", file, "--measure", "time,cost"])


def tags_data(facts: TagFacts) -> dict[str, Any]:
    """The facts about a file's tags, in the words of the command line."""
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
) -> list[list[int]]:
    """Runs of equal siblings, as the tree in the terminal draws them once; positions in ``above``."""
    flops = next((measure.total for measure in measures if measure.key == "flops"), {})
    words = [measure.words for measure in measures if measure.words]

    def key(path: str) -> Hashable:
        """The properties that equal siblings share, failures and measured words included."""
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

    return repeats(above, key)


def _failures(inventory: Inventory) -> list[str]:
    """The first five failures, without ancestors of a failed module.

    An ancestor fails because its descendant does; five are enough to begin with.
    """
    failed = {path: module.failure for path, module in inventory.modules.items() if module.failure}
    ancestors = tags.all_above(failed)
    failures = []
    for path, failure in failed.items():
        if path not in ancestors:
            failures.append(f"{path or '(root)'}: {in_both(failure)}")
    return failures[:5]


def _facts(inventory: Inventory) -> list[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in inventory.opsets.items())
    external = "external data" if inventory.external_data else ""
    return [*filter(None, (inventory.producer, f"opset {opsets}" if opsets else "", external))]


def _module(module: ModuleEntry, parent: int | None) -> dict[str, Any]:
    """The data of a module; ``parent`` is its index in the list of modules."""
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
    """The data of a node."""
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
    """The data of a measure: values by module and, if they can be distributed, by node."""
    by_node: list[float | None] = []
    if measure.additive and (measure.main or measure.nodes):
        by_node = spread(measure, inventory)
    measured = [
        position for position, node in enumerate(inventory.nodes) if node.name in measure.nodes
    ]
    return {
        "key": measure.key,
        "title": measure.title,
        "unit": measure.unit,
        "additive": measure.additive,
        "main": measure.main,
        "named": measure.named,
        "total": [json_number(measure.total.get(path)) for path in paths],
        "own": [json_number(measure.own.get(path)) for path in paths],
        "nodes": [None if value is None else float(f"{value:.6g}") for value in by_node],
        "said": True if len(measured) == len(inventory.nodes) else measured,
        "words": {
            position: measure.words[path]
            for position, path in enumerate(paths)
            if path in measure.words
        },
    }


def json_number(value: float | None) -> float | str | None:
    """A number; as a word if JSON cannot express it."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "inf" if value > 0 else "-inf"


def front_data(search: Search) -> dict[str, Any]:
    """The data of a search: its picture, its front, and the plan of each point.

    With one objective, or without finite values, it has no picture.
    """
    from htp_export.capabilities.search.front_files import front_svg, plan_file

    # By identity: two trials may be equal.
    places = {id(trial): place for place, trial in reversed([*enumerate(search.trials)])}
    front = [places[id(trial)] for trial in search.pareto]
    files = {place: plan_file(number, search.trials[place]) for number, place in enumerate(front)}
    try:
        picture = front_svg(search)
    except InputError:
        picture = ""
    trials = [
        _trial(trial, search, files.get(place, "")) for place, trial in enumerate(search.trials)
    ]
    return {
        "summary": search.summary,
        "objectives": list(search.objectives),
        "svg": picture,
        "front": front,
        "trials": trials,
    }


def _trial(trial: Trial, search: Search, file: str) -> dict[str, Any]:
    """The data of a point of a search; ``file`` is that of its plan, if it is on the front."""
    from htp_export.capabilities.search.search_results import trial_columns

    texts = {column.name: column.text or str for column in trial_columns(search.objectives)}
    plan = []
    for selector, chosen in trial.choices.items():
        words = ", ".join([chosen, *_fields(trial.plan.get(selector))])
        plan.append((selector or "(root)", words))
    return {
        "name": trial.name,
        "file": file,
        "values": [texts[name](trial.values[name]) for name in search.objectives],
        "origin": trial.origin,
        "precisions": trial.counted,
        "plan": plan,
    }


def _fields(precision: object) -> list[str]:
    """The fields of a precision besides its name, as words."""
    if not isinstance(precision, Mapping):
        return []
    return [f"{name} {value}" for name, value in precision.items() if name != "precision"]
