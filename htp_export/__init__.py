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
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from htp_export.attention.decomposing import decomposed_attention
    from htp_export.capabilities.attention_report.attention_reporting import attention_report
    from htp_export.capabilities.carry.adopting import Adopted, AdoptedModule, adopt
    from htp_export.capabilities.carry.carrying import Carried, carry, embed_map
    from htp_export.capabilities.cost.costing import cost
    from htp_export.capabilities.cost.result import Cost
    from htp_export.capabilities.cost.work import Work
    from htp_export.capabilities.diff.differing import ModelDifference, ModuleDifference, diff
    from htp_export.capabilities.extract.extraction import Extraction, extract
    from htp_export.capabilities.extract.splicing import Splice, splice
    from htp_export.capabilities.fingerprint.blocks import Block
    from htp_export.capabilities.fingerprint.families import Fingerprint, fingerprint
    from htp_export.capabilities.forensics.finding import Finding, Forensics
    from htp_export.capabilities.forensics.investigation import forensics
    from htp_export.capabilities.functions.inlining import Inlined, inline
    from htp_export.capabilities.functions.nesting import Nested, functions
    from htp_export.capabilities.info.describing import Info, info
    from htp_export.capabilities.inspect.inspected import Inspected
    from htp_export.capabilities.inspect.inspecting import inspect
    from htp_export.capabilities.lora.lora_files import FusedLora, LoraAdapter
    from htp_export.capabilities.lora.lora_inputs import InsertedLora, LoraLayer
    from htp_export.capabilities.nodes.map_result import ModelMap
    from htp_export.capabilities.nodes.mapping import nodes
    from htp_export.capabilities.optimize.optimizing import optimize
    from htp_export.capabilities.optimize.results import Optimized
    from htp_export.capabilities.partition.partitions import Partition, Stage
    from htp_export.capabilities.partition.stage_folder import load_partition
    from htp_export.capabilities.partition.staging import partition
    from htp_export.capabilities.pipeline.pipeline_results import PipelineRun, StepReport
    from htp_export.capabilities.pipeline.running import pipeline
    from htp_export.capabilities.place.crossings import Crossing
    from htp_export.capabilities.place.observing import placement
    from htp_export.capabilities.place.placed import DeviceUse, Misplaced, Placed, PlacedModule, Placement
    from htp_export.capabilities.place.placing import place
    from htp_export.capabilities.profile.latency import profile
    from htp_export.capabilities.profile.latency_results import ModuleLatency, Profile
    from htp_export.capabilities.prune.pruned import Pruned, PrunedModule
    from htp_export.capabilities.prune.pruning import prune
    from htp_export.capabilities.quantize.plan_exporting import PlanFile, export_plan
    from htp_export.capabilities.quantize.precisions import Precision
    from htp_export.capabilities.quantize.quantized import Quantized, QuantizedModule
    from htp_export.capabilities.quantize.quantizing import quantize
    from htp_export.capabilities.quantize.training import frozen_fake_quantize, module_filter
    from htp_export.capabilities.rename.naming import Named, rename
    from htp_export.capabilities.search.search_results import Search
    from htp_export.capabilities.search.searching import search
    from htp_export.capabilities.search.sensitivities import sensitivity
    from htp_export.capabilities.search.sensitivity_results import Sensitivity
    from htp_export.capabilities.verify.file_comparing import compare
    from htp_export.capabilities.verify.results import Comparison, Verification
    from htp_export.capabilities.verify.verifying import verify
    from htp_export.capabilities.view.viewing import View, view
    from htp_export.errors import HtpExportError, InputError
    from htp_export.exporter.exporting import export, tagging
    from htp_export.exporter.repair_report import Contamination, contamination
    from htp_export.format.hierarchy import Hierarchy, ModuleInfo
    from htp_export.model.tagged import Region, TaggedModel, load
    from htp_export.results.compressed import CompressedModule

__all__ = [
    "Adopted",
    "AdoptedModule",
    "Block",
    "Carried",
    "Comparison",
    "CompressedModule",
    "Contamination",
    "Cost",
    "Crossing",
    "DeviceUse",
    "Extraction",
    "Finding",
    "Fingerprint",
    "Forensics",
    "FusedLora",
    "Hierarchy",
    "HtpExportError",
    "Info",
    "Inlined",
    "InputError",
    "InsertedLora",
    "Inspected",
    "LoraAdapter",
    "LoraLayer",
    "Misplaced",
    "ModelDifference",
    "ModelMap",
    "ModuleDifference",
    "ModuleInfo",
    "ModuleLatency",
    "Named",
    "Nested",
    "Optimized",
    "Partition",
    "PipelineRun",
    "Placed",
    "PlacedModule",
    "Placement",
    "PlanFile",
    "Precision",
    "Profile",
    "Pruned",
    "PrunedModule",
    "Quantized",
    "QuantizedModule",
    "Region",
    "Search",
    "Sensitivity",
    "Splice",
    "Stage",
    "StepReport",
    "TaggedModel",
    "Verification",
    "View",
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
    "info",
    "inline",
    "inspect",
    "load",
    "load_partition",
    "module_filter",
    "nodes",
    "optimize",
    "partition",
    "pipeline",
    "place",
    "placement",
    "profile",
    "prune",
    "quantize",
    "rename",
    "search",
    "sensitivity",
    "splice",
    "tagging",
    "verify",
    "view",
]

__version__ = "0.1.0"

_HOMES = {
    "Adopted": "capabilities.carry.adopting",
    "AdoptedModule": "capabilities.carry.adopting",
    "Block": "capabilities.fingerprint.blocks",
    "Carried": "capabilities.carry.carrying",
    "Comparison": "capabilities.verify.results",
    "CompressedModule": "results.compressed",
    "Contamination": "exporter.repair_report",
    "Cost": "capabilities.cost.result",
    "Crossing": "capabilities.place.crossings",
    "DeviceUse": "capabilities.place.placed",
    "Extraction": "capabilities.extract.extraction",
    "Finding": "capabilities.forensics.finding",
    "Fingerprint": "capabilities.fingerprint.families",
    "Forensics": "capabilities.forensics.finding",
    "FusedLora": "capabilities.lora.lora_files",
    "Hierarchy": "format.hierarchy",
    "HtpExportError": "errors",
    "Info": "capabilities.info.describing",
    "Inlined": "capabilities.functions.inlining",
    "InputError": "errors",
    "InsertedLora": "capabilities.lora.lora_inputs",
    "Inspected": "capabilities.inspect.inspected",
    "LoraAdapter": "capabilities.lora.lora_files",
    "LoraLayer": "capabilities.lora.lora_inputs",
    "Misplaced": "capabilities.place.placed",
    "ModelDifference": "capabilities.diff.differing",
    "ModelMap": "capabilities.nodes.map_result",
    "ModuleDifference": "capabilities.diff.differing",
    "ModuleInfo": "format.hierarchy",
    "ModuleLatency": "capabilities.profile.latency_results",
    "Named": "capabilities.rename.naming",
    "Nested": "capabilities.functions.nesting",
    "Optimized": "capabilities.optimize.results",
    "Partition": "capabilities.partition.partitions",
    "PipelineRun": "capabilities.pipeline.pipeline_results",
    "Placed": "capabilities.place.placed",
    "PlacedModule": "capabilities.place.placed",
    "Placement": "capabilities.place.placed",
    "PlanFile": "capabilities.quantize.plan_exporting",
    "Precision": "capabilities.quantize.precisions",
    "Profile": "capabilities.profile.latency_results",
    "Pruned": "capabilities.prune.pruned",
    "PrunedModule": "capabilities.prune.pruned",
    "Quantized": "capabilities.quantize.quantized",
    "QuantizedModule": "capabilities.quantize.quantized",
    "Region": "model.tagged",
    "Search": "capabilities.search.search_results",
    "Sensitivity": "capabilities.search.sensitivity_results",
    "Splice": "capabilities.extract.splicing",
    "Stage": "capabilities.partition.partitions",
    "StepReport": "capabilities.pipeline.pipeline_results",
    "TaggedModel": "model.tagged",
    "Verification": "capabilities.verify.results",
    "View": "capabilities.view.viewing",
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
    "export_plan": "capabilities.quantize.plan_exporting",
    "extract": "capabilities.extract.extraction",
    "fingerprint": "capabilities.fingerprint.families",
    "forensics": "capabilities.forensics.investigation",
    "frozen_fake_quantize": "capabilities.quantize.training",
    "functions": "capabilities.functions.nesting",
    "info": "capabilities.info.describing",
    "inline": "capabilities.functions.inlining",
    "inspect": "capabilities.inspect.inspecting",
    "load": "model.tagged",
    "load_partition": "capabilities.partition.stage_folder",
    "module_filter": "capabilities.quantize.training",
    "nodes": "capabilities.nodes.mapping",
    "optimize": "capabilities.optimize.optimizing",
    "partition": "capabilities.partition.staging",
    "pipeline": "capabilities.pipeline.running",
    "place": "capabilities.place.placing",
    "placement": "capabilities.place.observing",
    "profile": "capabilities.profile.latency",
    "prune": "capabilities.prune.pruning",
    "quantize": "capabilities.quantize.quantizing",
    "rename": "capabilities.rename.naming",
    "search": "capabilities.search.searching",
    "sensitivity": "capabilities.search.sensitivities",
    "splice": "capabilities.extract.splicing",
    "tagging": "exporter.exporting",
    "verify": "capabilities.verify.verifying",
    "view": "capabilities.view.viewing",
}


_SUBPACKAGES = ("errors", "huggingface", "lora", "passes", "tools")
"""What the documentation names beside functions and classes, ``htp_export.tools.onnxslim``."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and reading a file does not need it."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    tables = sys.modules.get(f"{__name__}.results.tables")
    if tables is not None:
        tables.ModuleTable.in_notebook = _in_notebook
    return found


def _in_notebook(result: Any) -> str | None:
    """A result as a notebook shows it; only then what draws it is imported."""
    from htp_export.drawing.notebook import in_notebook

    return in_notebook(result)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
