"""ONNX files that keep the module hierarchy of the PyTorch model they came from.

Examples:
    >>> import torch, htp_export
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
    >>> {path: [node.op_type for node in tagged[path].nodes] for path in tagged.paths}
    {'': ['Gemm', 'Relu'], '0': ['Gemm'], '1': ['Relu']}
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from htp_export.attention.decomposing import decomposed_attention
    from htp_export.capabilities.attention_report.attention_reporting import attention_report
    from htp_export.capabilities.carry.adopting import adopt
    from htp_export.capabilities.carry.carrying import carry, embed_map
    from htp_export.capabilities.cost.costing import cost
    from htp_export.capabilities.cost.work import Work
    from htp_export.capabilities.diff.differing import diff
    from htp_export.capabilities.export_plan.plan_exporting import export_plan
    from htp_export.capabilities.extract.extraction import extract
    from htp_export.capabilities.extract.splicing import splice
    from htp_export.capabilities.fingerprint.families import fingerprint
    from htp_export.capabilities.forensics.investigation import forensics
    from htp_export.capabilities.functions.inlining import inline
    from htp_export.capabilities.functions.nesting import functions
    from htp_export.capabilities.inspect.inspecting import inspect
    from htp_export.capabilities.lora.lora_files import fuse_lora, lora_adapter
    from htp_export.capabilities.lora.lora_inputs import insert_lora
    from htp_export.capabilities.nodes.mapping import map
    from htp_export.capabilities.optimize.optimizing import optimize
    from htp_export.capabilities.partition.stage_folder import load_partition
    from htp_export.capabilities.partition.staging import partition
    from htp_export.capabilities.pipeline.running import pipeline
    from htp_export.capabilities.place.observing import placement
    from htp_export.capabilities.place.placing import place
    from htp_export.capabilities.profile.latency import profile
    from htp_export.capabilities.prune.pruning import prune
    from htp_export.capabilities.quantize.precisions import Precision
    from htp_export.capabilities.quantize.quantizing import quantize
    from htp_export.capabilities.quantize.training import frozen_fake_quantize, module_filter
    from htp_export.capabilities.rename.naming import names
    from htp_export.capabilities.search.searching import search
    from htp_export.capabilities.search.sensitivities import sensitivity
    from htp_export.capabilities.verify.file_comparing import compare
    from htp_export.capabilities.verify.verifying import verify
    from htp_export.capabilities.view.viewing import view
    from htp_export.errors import HtpExportError, InputError
    from htp_export.exporter.exporting import export, tagging
    from htp_export.exporter.repair_report import contamination
    from htp_export.format.hierarchy import Hierarchy, ModuleInfo
    from htp_export.model.tagged import Region, TaggedModel, load

__all__ = [
    "Hierarchy",
    "HtpExportError",
    "InputError",
    "ModuleInfo",
    "Precision",
    "Region",
    "TaggedModel",
    "Work",
    "adopt",
    "attention_report",
    "carry",
    "compare",
    "contamination",
    "cost",
    "decomposed_attention",
    "diff",
    "embed_map",
    "export",
    "export_plan",
    "extract",
    "fingerprint",
    "forensics",
    "frozen_fake_quantize",
    "functions",
    "fuse_lora",
    "inline",
    "insert_lora",
    "inspect",
    "load",
    "load_partition",
    "lora_adapter",
    "map",
    "module_filter",
    "names",
    "optimize",
    "partition",
    "pipeline",
    "place",
    "placement",
    "profile",
    "prune",
    "quantize",
    "search",
    "sensitivity",
    "splice",
    "tagging",
    "verify",
    "view",
]

__version__ = "0.1.0"

_HOMES = {
    "Hierarchy": "format.hierarchy",
    "HtpExportError": "errors",
    "InputError": "errors",
    "ModuleInfo": "format.hierarchy",
    "Precision": "capabilities.quantize.precisions",
    "Region": "model.tagged",
    "TaggedModel": "model.tagged",
    "Work": "capabilities.cost.work",
    "adopt": "capabilities.carry.adopting",
    "attention_report": "capabilities.attention_report.attention_reporting",
    "carry": "capabilities.carry.carrying",
    "compare": "capabilities.verify.file_comparing",
    "contamination": "exporter.repair_report",
    "cost": "capabilities.cost.costing",
    "decomposed_attention": "attention.decomposing",
    "diff": "capabilities.diff.differing",
    "embed_map": "capabilities.carry.carrying",
    "export": "exporter.exporting",
    "export_plan": "capabilities.export_plan.plan_exporting",
    "extract": "capabilities.extract.extraction",
    "fingerprint": "capabilities.fingerprint.families",
    "forensics": "capabilities.forensics.investigation",
    "frozen_fake_quantize": "capabilities.quantize.training",
    "functions": "capabilities.functions.nesting",
    "fuse_lora": "capabilities.lora.lora_files",
    "inline": "capabilities.functions.inlining",
    "insert_lora": "capabilities.lora.lora_inputs",
    "inspect": "capabilities.inspect.inspecting",
    "load": "model.tagged",
    "load_partition": "capabilities.partition.stage_folder",
    "lora_adapter": "capabilities.lora.lora_files",
    "map": "capabilities.nodes.mapping",
    "module_filter": "capabilities.quantize.training",
    "names": "capabilities.rename.naming",
    "optimize": "capabilities.optimize.optimizing",
    "partition": "capabilities.partition.staging",
    "pipeline": "capabilities.pipeline.running",
    "place": "capabilities.place.placing",
    "placement": "capabilities.place.observing",
    "profile": "capabilities.profile.latency",
    "prune": "capabilities.prune.pruning",
    "quantize": "capabilities.quantize.quantizing",
    "search": "capabilities.search.searching",
    "sensitivity": "capabilities.search.sensitivities",
    "splice": "capabilities.extract.splicing",
    "tagging": "exporter.exporting",
    "verify": "capabilities.verify.verifying",
    "view": "capabilities.view.viewing",
}


_SUBPACKAGES = ("errors", "huggingface", "passes", "results", "tools")
"""What the documentation names beside functions and classes, ``htp_export.tools.onnxslim``."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and reading a file does not need it."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
