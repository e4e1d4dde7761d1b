"""ONNX files that keep the module hierarchy of their PyTorch model.

Examples:
    >>> import torch, htp_export
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
    >>> {path: [node.op_type for node in tagged[path].nodes] for path in tagged.paths}
    {'': ['Gemm', 'Relu'], '0': ['Gemm'], '1': ['Relu']}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from htp_export.discovery import imported_when_used
from htp_export.version import __version__ as __version__

if TYPE_CHECKING:  # `__getattr__` reads these imports
    from htp_export.alignment.origin_map import embed_map
    from htp_export.attention.decomposing import decomposed_attention
    from htp_export.capabilities.attention_report.attention_reporting import attention_report
    from htp_export.capabilities.bind.binding import bind
    from htp_export.capabilities.carry.carrying import carry
    from htp_export.capabilities.diff.differing import diff
    from htp_export.capabilities.extract.extraction import extract, splice
    from htp_export.capabilities.fingerprint.families import fingerprint
    from htp_export.capabilities.forensics.investigation import forensics
    from htp_export.capabilities.functions.nesting import functions, inline
    from htp_export.capabilities.info.describing import info
    from htp_export.capabilities.inspect.inspecting import inspect
    from htp_export.capabilities.nodes.mapping import nodes
    from htp_export.capabilities.optimize.optimizing import optimize
    from htp_export.capabilities.partition.stage_folder import load_partition
    from htp_export.capabilities.partition.staging import partition
    from htp_export.capabilities.pipeline.running import pipeline
    from htp_export.capabilities.place.placing import place, placement
    from htp_export.capabilities.profile.latency import profile
    from htp_export.capabilities.prune.pruning import prune
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.plan_exporting import export_plan
    from htp_export.capabilities.quantize.quantizing import quantize
    from htp_export.capabilities.quantize.training import frozen_fake_quantize, module_filter
    from htp_export.capabilities.rename.naming import rename
    from htp_export.capabilities.search.searching import search
    from htp_export.capabilities.search.sensitivities import sensitivity
    from htp_export.capabilities.tap.steering import steer
    from htp_export.capabilities.tap.tapping import tap, untap
    from htp_export.capabilities.verify.file_comparing import compare
    from htp_export.capabilities.verify.verifying import verify
    from htp_export.capabilities.view.viewing import view
    from htp_export.costs.costing import cost
    from htp_export.costs.work import Work
    from htp_export.errors import HtpExportError, InputError
    from htp_export.exporter.exporting import export, tagging
    from htp_export.exporter.repair_report import contamination
    from htp_export.format.hierarchy import Hierarchy, ModuleInfo
    from htp_export.model.regions import Region
    from htp_export.model.tagged import TaggedModel, load

__all__ = [
    "Hierarchy", "HtpExportError", "InputError", "ModuleInfo", "Precision", "Region", "TaggedModel", "Work",
    "attention_report", "bind", "carry", "compare", "contamination", "cost", "decomposed_attention", "diff",
    "embed_map", "export", "export_plan", "extract", "fingerprint", "forensics", "frozen_fake_quantize",
    "functions", "info", "inline", "inspect", "load", "load_partition", "module_filter", "nodes", "optimize",
    "partition", "pipeline", "place", "placement", "profile", "prune", "quantize", "rename", "search",
    "sensitivity", "splice", "steer", "tagging", "tap", "untap", "verify", "view",
]  # fmt: skip

_SUBPACKAGES = ("errors", "huggingface", "lora", "passes", "results", "tools")
"""Public modules, such as ``htp_export.tools``, which are imported when they are first used."""

__getattr__ = imported_when_used(__name__, __file__, _SUBPACKAGES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
