"""Result types of the public functions, ``from htp_export.results import Profile``, and their base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from htp_export.discovery import imported_when_used

if TYPE_CHECKING:  # `__getattr__` finds them here
    from htp_export.capabilities.attention_report.attention_reporting import AttentionReport
    from htp_export.capabilities.bind.bound import Bound
    from htp_export.capabilities.carry.carrying import Carried, CarriedModule
    from htp_export.capabilities.diff.differing import ModelDifference, ModuleDifference
    from htp_export.capabilities.extract.extraction import Extraction, Splice
    from htp_export.capabilities.fingerprint.families import Block, Fingerprint
    from htp_export.capabilities.forensics.finding import Finding, Forensics
    from htp_export.capabilities.functions.nesting import Inlined, Nested
    from htp_export.capabilities.info.describing import Info
    from htp_export.capabilities.inspect.inspected import Inspected
    from htp_export.capabilities.lora.lora_files import FusedLora, LoraAdapter
    from htp_export.capabilities.lora.lora_inputs import InsertedLora, LoraLayer
    from htp_export.capabilities.nodes.finding import FoundNodes
    from htp_export.capabilities.nodes.map_result import ModelMap
    from htp_export.capabilities.optimize.results import Change, Optimized, PassReport
    from htp_export.capabilities.partition.partitions import Partition, Stage
    from htp_export.capabilities.pipeline.running import PipelineRun, StepReport
    from htp_export.capabilities.place.placed import (
        Crossing,
        DeviceUse,
        Misplaced,
        Placed,
        PlacedModule,
        Placement,
    )
    from htp_export.capabilities.profile.latency_results import ModuleLatency, Profile
    from htp_export.capabilities.prune.pruned import Pruned, PrunedModule
    from htp_export.capabilities.quantize.plan_exporting import PlanFile
    from htp_export.capabilities.quantize.quantized import Check, Kept, Quantized, QuantizedModule
    from htp_export.capabilities.rename.naming import Named
    from htp_export.capabilities.search.architecture_results import (
        Architectures,
        Candidate,
        CandidatePart,
        FailedCandidate,
    )
    from htp_export.capabilities.search.search_results import Search, Trial
    from htp_export.capabilities.search.sensitivity_results import ModuleSensitivity, Sensitivity
    from htp_export.capabilities.tap.tapping import Tapped, TappedTensor
    from htp_export.capabilities.verify.results import Comparison, ModuleResult, Verification
    from htp_export.capabilities.view.viewing import View
    from htp_export.costs.result import Cost
    from htp_export.exporter.repair_report import Contamination
    from htp_export.reporting.tables import CompressedModule

__all__ = [
    "Architectures", "AttentionReport", "Block", "Bound", "Candidate", "CandidatePart", "Carried", "CarriedModule",
    "Change", "Check", "Comparison", "CompressedModule", "Contamination", "Cost", "Crossing", "DeviceUse",
    "Extraction", "FailedCandidate", "Finding", "Fingerprint",
    "Forensics", "FoundNodes", "FusedLora", "Info", "Inlined", "InsertedLora", "Inspected", "Kept", "LoraAdapter",
    "LoraLayer", "Misplaced", "ModelDifference", "ModelMap", "ModuleDifference", "ModuleLatency", "ModuleResult",
    "ModuleSensitivity", "Named", "Nested", "Optimized", "Partition", "PassReport", "PipelineRun", "Placed",
    "PlacedModule", "Placement", "PlanFile", "Profile", "Pruned", "PrunedModule", "Quantized", "QuantizedModule",
    "Search", "Sensitivity", "Splice", "Stage", "StepReport", "Tapped", "TappedTensor", "Trial", "Verification",
    "View",
]  # fmt: skip

__getattr__ = imported_when_used(__name__, __file__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
