"""Graphs of torch's operators from ``torch.export``, with tags: for models that ONNX has no translation of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from htp_export.errors import CaptureError
from htp_export.exporter.capture import patches, running
from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.dynamo_patches import prepare
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.program_graph import drop_identities, graph_of_program
from htp_export.exporter.rewriting import write_tags
from htp_export.process.restoring import Changes, hold_collection, restored, set_variable, turn_attention_fast_path_off


@dataclass(frozen=True)
class LoweredGraph:
    """An FX graph of any kind, in torch's operators."""

    # The graph, without tags. ``meta["node"]`` of each node is the FX node that it was made of.
    model: ir.Model
    inputs: tuple[str | None, ...]  # for each tensor that it was given, its name; None for what is no tensor
    outputs: tuple[str | None, ...]  # the same for what it returns


def lowered_graph(
    module: torch.fx.GraphModule, inputs: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> LoweredGraph:
    """Translate the functions that an FX graph without breaks calls into torch's operators."""
    with torch.no_grad():
        program = torch.export.export(module, inputs, dict(named or {}), strict=False).run_decompositions({})
    model, values = graph_of_program(program)
    signature = program.graph_signature

    def name_of(spec: Any) -> str | None:
        value = values.get(spec.arg.name) if spec.kind.name in ("USER_INPUT", "USER_OUTPUT") else None
        return str(value.name) if isinstance(value, ir.Value) else None

    given = tuple(name_of(spec) for spec in signature.input_specs if spec.kind.name == "USER_INPUT")
    returned = tuple(name_of(spec) for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT")
    return LoweredGraph(model, given, returned)


def exported_graph(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ir.Model:
    """Export a model with ``torch.export``, and tag the graph of its program (`graph_of_program`) as a file would be.

    If torch's own tracer fails, Dynamo traces the model (``strict=True``): it knows NumPy, and ``print``. The graph is
    functional and not decomposed.
    """
    try:
        return _attempt(model, args, kwargs, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        try:
            return _attempt(model, args, kwargs, strict=True)
        except Exception:
            raise error from error.__cause__


def _attempt(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, strict: bool) -> ir.Model:
    names = ModuleNames(model)
    capture = DynamoCapture.of(names)

    def make(changes: Changes) -> None:
        running.wait_alone(changes)
        for places in (patches.DYNAMO_ENTRY, patches.MODULE_CALLS, patches.DYNAMO):
            places.hold(changes)
        turn_attention_fast_path_off(changes)
        hold_collection(changes, kept=True)
        capture.changes = changes.inner()
        set_variable(changes, running.dynamo_capture, capture)

    with restored(make):
        with torch.no_grad():
            program = torch.export.export(model, args, dict(kwargs), strict=strict)
            functional = prepare(lambda made: made.run_decompositions({}))(program)
        capture.step("noting the calls in branches", capture.calls.mark_bodies, functional)
        graph, values = graph_of_program(functional)
        capture.step("noting the values of an FX graph", capture.translated_nodes, values)
        capture.step("reading the graph as it was translated", capture.translated, graph)
        capture.step("dropping nodes that compute nothing", drop_identities, graph.graph, capture.replaced)
        capture.step("tagging the nodes of the graph", write_tags, capture, graph, names.hierarchy, names.parameters)
        capture.give_up()
        return graph
