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
    from htp_export.compress.compressed import CompressedModule
    from htp_export.compress.lora.lora_files import FusedLora, LoraAdapter, fuse_lora, lora_adapter
    from htp_export.compress.lora.lora_inputs import InsertedLora, LoraLayer, insert_lora
    from htp_export.compress.pipelines.pipeline_results import PipelineRun, StepReport
    from htp_export.compress.pipelines.running import pipeline
    from htp_export.compress.plan_export.plan_exporting import PlanFile, export_plan
    from htp_export.compress.pruning.pruned import Pruned, PrunedModule
    from htp_export.compress.pruning.pruning import prune
    from htp_export.compress.quantization.precisions import Precision
    from htp_export.compress.quantization.quantized import Quantized, QuantizedModule
    from htp_export.compress.quantization.quantizing import quantize
    from htp_export.compress.quantization.training import frozen_fake_quantize, module_filter
    from htp_export.compress.trade_offs.search_results import Search
    from htp_export.compress.trade_offs.searching import search
    from htp_export.compress.trade_offs.sensitivities import sensitivity
    from htp_export.compress.trade_offs.sensitivity_results import Sensitivity
    from htp_export.costs.costing import cost
    from htp_export.costs.result import Cost
    from htp_export.costs.work import Work
    from htp_export.deploy.crossings import Crossing
    from htp_export.deploy.naming import Named, names
    from htp_export.deploy.observing import placement
    from htp_export.deploy.placed import DeviceUse, Misplaced, Placed, PlacedModule, Placement
    from htp_export.deploy.placing import place
    from htp_export.differences.differing import ModelDifference, ModuleDifference, diff
    from htp_export.errors import HtpExportError, InputError
    from htp_export.exporter.exporting import export, tagging
    from htp_export.exporter.repair_report import Contamination, contamination
    from htp_export.findings.finding import Finding, Forensics
    from htp_export.findings.investigation import forensics
    from htp_export.fingerprints.blocks import Block
    from htp_export.fingerprints.families import Fingerprint, fingerprint
    from htp_export.format.hierarchy import Hierarchy, ModuleInfo
    from htp_export.inspection.inspected import Inspected
    from htp_export.inspection.inspecting import inspect
    from htp_export.model.map_result import ModelMap
    from htp_export.model.mapping import map
    from htp_export.model.tagged import Region, TaggedModel, load
    from htp_export.passes.optimizing import optimize
    from htp_export.passes.results import Optimized
    from htp_export.provenance.adoption.adopted import Adopted, AdoptedModule
    from htp_export.provenance.adoption.adopting import adopt
    from htp_export.provenance.carrying import Carried, carry, embed_map
    from htp_export.run.attention_reporting import attention_report
    from htp_export.run.file_comparing import compare
    from htp_export.run.latency import profile
    from htp_export.run.latency_results import ModuleLatency, Profile
    from htp_export.run.results import Comparison, Verification
    from htp_export.run.verifying import verify
    from htp_export.show.viewing import View, view
    from htp_export.surgery.extraction import Extraction, extract
    from htp_export.surgery.inlining import Inlined, inline
    from htp_export.surgery.manifest import load_partition
    from htp_export.surgery.nesting import Nested, functions
    from htp_export.surgery.partitions import Partition
    from htp_export.surgery.splicing import Splice, splice
    from htp_export.surgery.stages import Stage
    from htp_export.surgery.staging import partition

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
    "Adopted": "provenance.adoption.adopted",
    "AdoptedModule": "provenance.adoption.adopted",
    "Block": "fingerprints.blocks",
    "Carried": "provenance.carrying",
    "Comparison": "run.results",
    "CompressedModule": "compress.compressed",
    "Contamination": "exporter.repair_report",
    "Cost": "costs.result",
    "Crossing": "deploy.crossings",
    "DeviceUse": "deploy.placed",
    "Extraction": "surgery.extraction",
    "Finding": "findings.finding",
    "Fingerprint": "fingerprints.families",
    "Forensics": "findings.finding",
    "FusedLora": "compress.lora.lora_files",
    "Hierarchy": "format.hierarchy",
    "HtpExportError": "errors",
    "Inlined": "surgery.inlining",
    "InputError": "errors",
    "InsertedLora": "compress.lora.lora_inputs",
    "Inspected": "inspection.inspected",
    "LoraAdapter": "compress.lora.lora_files",
    "LoraLayer": "compress.lora.lora_inputs",
    "Misplaced": "deploy.placed",
    "ModelDifference": "differences.differing",
    "ModelMap": "model.map_result",
    "ModuleDifference": "differences.differing",
    "ModuleInfo": "format.hierarchy",
    "ModuleLatency": "run.latency_results",
    "Named": "deploy.naming",
    "Nested": "surgery.nesting",
    "Optimized": "passes.results",
    "Partition": "surgery.partitions",
    "PipelineRun": "compress.pipelines.pipeline_results",
    "Placed": "deploy.placed",
    "PlacedModule": "deploy.placed",
    "Placement": "deploy.placed",
    "PlanFile": "compress.plan_export.plan_exporting",
    "Precision": "compress.quantization.precisions",
    "Profile": "run.latency_results",
    "Pruned": "compress.pruning.pruned",
    "PrunedModule": "compress.pruning.pruned",
    "Quantized": "compress.quantization.quantized",
    "QuantizedModule": "compress.quantization.quantized",
    "Region": "model.tagged",
    "Search": "compress.trade_offs.search_results",
    "Sensitivity": "compress.trade_offs.sensitivity_results",
    "Splice": "surgery.splicing",
    "Stage": "surgery.stages",
    "StepReport": "compress.pipelines.pipeline_results",
    "TaggedModel": "model.tagged",
    "Verification": "run.results",
    "View": "show.viewing",
    "Work": "costs.work",
    "adopt": "provenance.adoption.adopting",
    "attention_report": "run.attention_reporting",
    "carry": "provenance.carrying",
    "compare": "run.file_comparing",
    "contamination": "exporter.repair_report",
    "cost": "costs.costing",
    "decomposed_attention": "attention.decomposing",
    "diff": "differences.differing",
    "embed_map": "provenance.carrying",
    "export": "exporter.exporting",
    "export_plan": "compress.plan_export.plan_exporting",
    "extract": "surgery.extraction",
    "fingerprint": "fingerprints.families",
    "forensics": "findings.investigation",
    "frozen_fake_quantize": "compress.quantization.training",
    "functions": "surgery.nesting",
    "fuse_lora": "compress.lora.lora_files",
    "inline": "surgery.inlining",
    "insert_lora": "compress.lora.lora_inputs",
    "inspect": "inspection.inspecting",
    "load": "model.tagged",
    "load_partition": "surgery.manifest",
    "lora_adapter": "compress.lora.lora_files",
    "map": "model.mapping",
    "module_filter": "compress.quantization.training",
    "names": "deploy.naming",
    "optimize": "passes.optimizing",
    "partition": "surgery.staging",
    "pipeline": "compress.pipelines.running",
    "place": "deploy.placing",
    "placement": "deploy.observing",
    "profile": "run.latency",
    "prune": "compress.pruning.pruning",
    "quantize": "compress.quantization.quantizing",
    "search": "compress.trade_offs.searching",
    "sensitivity": "compress.trade_offs.sensitivities",
    "splice": "surgery.splicing",
    "tagging": "exporter.exporting",
    "verify": "run.verifying",
    "view": "show.viewing",
}


_SUBPACKAGES = ("tools", "errors")
"""What the documentation names beside functions and classes, ``htp_export.tools.onnxslim``."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and reading a file does not need it."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    tables = sys.modules.get(f"{__name__}.model.tables")
    if tables is not None:
        tables.ModuleTable.in_notebook = _in_notebook
    return found


def _in_notebook(result: Any) -> str | None:
    """A result as a notebook shows it; only then what draws it is imported."""
    from htp_export.show.notebook import in_notebook

    return in_notebook(result)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
