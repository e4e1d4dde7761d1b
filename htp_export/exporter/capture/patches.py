"""Every patch of torch and onnx_ir: which wrapper replaces which function.

A wrapper calls the original and reports to the capture of the running export. Some do more while an
export of ours runs in this thread: `slow_forward`, `traced`, `export_file` and `call_region`
replace the original; `serialize` and the groups `FASTER_...` do the same work faster. In every other
thread and task, all of them only call the original (`is_call_name` always returns the same).
``tests/exporter/test_torch_internals.py`` fails if a place in this file has moved.
"""

from __future__ import annotations

import contextlib
from typing import Any

from htp_export.exporter.capture import (
    dynamo_patches,
    faster_dynamo,
    faster_torchscript,
    saving,
    torchscript_patches,
)
from htp_export.exporter.capture.patching import Patch, Patches, noting
from htp_export.exporter.capture.running import (
    dynamo_capture,
    script_capture,
    translations_read,
    wanted,
)
from htp_export.process.restoring import Changes, restored, set_variable

_CORE = "torch.onnx._internal.exporter._core"
_SCRIPT = "torch.onnx._internal.torchscript_exporter.utils"
_SCRIPT_PROTO = "torch.onnx._internal.torchscript_exporter.onnx_proto_utils"

_OF_FX_GRAPH = "recording the ONNX values of an FX graph"
_FIRST_GRAPH = "reading the ONNX graph as it was translated"
_OPERATOR = "following the translation of an operator"
_FUNCTION = "following the translation of an autograd.Function"

# The start of an export. In groups, because the dynamo exporter takes 30 MB of memory to import.
if saving.is_late():
    _core_export = Patch(
        *saving.LATE_PLACE, saving.saving_after(dynamo_patches.core_export, wanted)
    )
else:
    _core_export = Patch(_CORE, "export", dynamo_patches.core_export)
DYNAMO_ENTRY = Patches(
    _core_export,
    Patch("torch.export._trace", "_export", dynamo_patches.export_program),
    Patch("torch._ops", "HigherOrderOperator.__call__", dynamo_patches.call_operator),
    Patch(
        "torch._higher_order_ops.invoke_subgraph",
        "invoke_subgraph_placeholder",
        dynamo_patches.call_region,
    ),
)
TORCHSCRIPT_ENTRY = Patches(
    Patch(_SCRIPT, "_export", torchscript_patches.script_export), lasting=True
)

MODULE_CALLS = Patches(
    Patch(
        "torch.fx.experimental.proxy_tensor",
        "_ModuleStackTracer.call_module",
        dynamo_patches.call_module,
    ),
)

DYNAMO = Patches(
    Patch(_CORE, "_prepare_exported_program_for_export", dynamo_patches.prepare),
    Patch(_CORE, "_translate_fx_graph", noting(dynamo_capture, _OF_FX_GRAPH, "translated_nodes")),
    Patch(
        _CORE,
        "_exported_program_to_onnx_program",
        noting(dynamo_capture, _FIRST_GRAPH, "translated_program"),
    ),
    Patch("torch.fx.interpreter", "Interpreter.run_node", dynamo_patches.run_node),
    Patch("torch.onnx", "ONNXProgram.optimize", dynamo_patches.optimize),
    Patch("torch.export.decomp_utils", "_collect_all_valid_cia_ops", dynamo_patches.list_once),
    Patch("torch.export.exported_program", "_collect_all_valid_cia_ops", dynamo_patches.list_once),
)

REPLACEMENTS = Patches(
    Patch("onnx_ir", "Node.replace_input_with", dynamo_patches.replace_input_with),
    Patch("onnx_ir", "Value.replace_all_uses_with", dynamo_patches.replace_all_uses_with),
    Patch("onnx_ir", "save", dynamo_patches.save),
    Patch("onnx_ir", "to_proto", dynamo_patches.save),
)

TRANSLATIONS = Patches(
    Patch(
        "torch.onnx._internal.exporter._registration",
        "ONNXRegistry.from_torchlib",
        dynamo_patches.read_once,
    ),
)

DYNAMO_FRAMES = Patches(Patch("torch._dynamo.trace_rules", "check", dynamo_patches.skips_frame))
DYNAMO_RESET = Patches(Patch("torch._dynamo", "reset", dynamo_patches.reset_dynamo))

TORCHSCRIPT = Patches(
    Patch(_SCRIPT, "_trace_and_get_graph_from_model", torchscript_patches.traced),
    # What it gets was created before: for a quantized model, torch runs `torch.jit.trace` then.
    Patch(_SCRIPT, "_get_named_param_dict", torchscript_patches.named_parameters),
    Patch(
        _SCRIPT, "_run_symbolic_function", noting(script_capture, _OPERATOR, "translation.node", 2)
    ),
    Patch(
        _SCRIPT,
        "_run_symbolic_method",
        noting(script_capture, _FUNCTION, "translation.function", 1),
    ),
    Patch(_SCRIPT, "_C", torchscript_patches.ScriptPasses),
    Patch(_SCRIPT_PROTO, "_add_onnxscript_fn", torchscript_patches.add_functions),
    Patch(_SCRIPT_PROTO, "_export_file", torchscript_patches.export_file),
    Patch("torch.nn", "Module._slow_forward", torchscript_patches.slow_forward),
    Patch("torch._C", "Graph._export_onnx", torchscript_patches.serialize),
    lasting=True,
)

NUMBERS_READ = Patches(
    *(
        Patch("torch", f"Tensor.{name}", torchscript_patches.reading_numbers)
        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__")
    ),
    lasting=True,
)

FASTER_TORCHSCRIPT = Patches(
    Patch("torch._C", "Node.inputs", faster_torchscript.listed("Node", "inputsSize", "inputsAt")),
    Patch(
        "torch._C", "Node.outputs", faster_torchscript.listed("Node", "outputsSize", "outputsAt")
    ),
    Patch("torch._C", "Node.blocks", faster_torchscript.blocks),
    Patch(
        "torch._C",
        "Graph.inputs",
        faster_torchscript.listed("Graph", "outputsSize", "outputsAt", "param_node"),
    ),
    Patch(
        "torch._C",
        "Graph.outputs",
        faster_torchscript.listed("Graph", "inputsSize", "inputsAt", "return_node"),
    ),
    Patch(
        "torch.onnx._internal.torchscript_exporter.symbolic_helper",
        "inspect",
        faster_torchscript.SignaturesOnce,
    ),
    Patch("torch.jit._trace", "_create_interpreter_name_lookup_fn", faster_torchscript.name_lookup),
    Patch("torch.jit._trace", "_unique_state_dict", faster_torchscript.unique_state),
    Patch("torch.jit", "_unique_state_dict", faster_torchscript.unique_state),
    Patch("torch.nn", "Module.train", faster_torchscript.mode_kept),
    Patch(_SCRIPT, "_C", faster_torchscript.FewerPasses),
    Patch(
        "torch.onnx._internal.torchscript_exporter.registration",
        "_dispatch_opset_version",
        faster_torchscript.opset_once,
    ),
    lasting=True,
)

FASTER_START = Patches(
    Patch("onnxscript.values", "TracedOnnxFunction.function_ir", faster_dynamo.NamesOfFunctions),
    optional=True,
)

_SOURCES = "torch.fx.traceback"
_DECOMPOSED = "torch.export.exported_program"
_PROMOTION = "torch.onnx._internal.fx.passes.type_promotion"
_RULES = "onnxscript.rewriter._rewrite_rule"

FASTER_DYNAMO = Patches(
    Patch(
        _DECOMPOSED,
        "_populate_param_buffer_metadata_to_new_gm",
        faster_dynamo.parameters_read_once,
    ),
    Patch("torch.export.unflatten", "_is_call_name", faster_dynamo.is_call_name),
    Patch(_SOURCES, "copy", faster_dynamo.SourcesCopied),
    Patch("torch.utils._traceback", "_extract_symbolized_tb", faster_dynamo.frames_once),
    Patch(_PROMOTION, "_TypePromotionInterpreter.run_node", faster_dynamo.known_results),
    Patch("onnx_ir.schemas", "OpSignature.from_op_schema", faster_dynamo.signatures_once),
    Patch(_RULES, "RewriteRule.try_rewrite", faster_dynamo.other_operators_skipped),
    optional=True,
)

EVERY = tuple(group for group in globals().copy().values() if isinstance(group, Patches))


def translations_read_once(
    read: dict[Any, Any] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Read torch's translations of operators once for all exports in a ``with`` block.

    Translations registered later are ignored. ``read``: translations that earlier exports have
    read; new ones are added.
    """

    def make(changes: Changes) -> None:
        TRANSLATIONS.hold(changes)
        set_variable(changes, translations_read, {} if read is None else read)

    return restored(make)
