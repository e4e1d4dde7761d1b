"""One export with tags, in place of torch's exporters: it is captured, then tagged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from htp_export.errors import CaptureError, TorchChangedError, described
from htp_export.exporter.capture import patches, running, torch_internals
from htp_export.exporter.capture.modules import ModuleNames, keep_training_modes, refused_modules
from htp_export.exporter.capture.root_module_call import RootCalls
from htp_export.exporter.capture.running import export_untagged, seam
from htp_export.exporter.capture.saving import save_whole
from htp_export.exporter.capture.torchscript import TorchScriptCapture
from htp_export.exporter.failures import notes_of_failure
from htp_export.exporter.model_lines import line_of_model
from htp_export.exporter.write_tags import make_tags
from htp_export.files.protobuf_bytes import SerializedModel
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import write_assumed
from htp_export.format.parameters import ModuleParameters
from htp_export.format.recipes import recipe_to_text
from htp_export.format.torch_metadata import source_lines, write_source
from htp_export.lineage.tagging import IR_VERSION, remove_tags
from htp_export.model.recipes import default_recipe
from htp_export.process.restoring import (
    Changes,
    hold_collection,
    keep_objects,
    set_variable,
    turn_attention_fast_path_off,
)

if TYPE_CHECKING:
    from htp_export.exporter.capture.dynamo import DynamoCapture


@dataclass(frozen=True)
class Captured:
    """The data for the tags of one model; a resumed capture does not keep the model alive."""

    capture: DynamoCapture
    # the model's module tree; None if only the modules that ran are known
    hierarchy: Hierarchy | None
    # module path → the parameters that it holds, where known
    parameters: Mapping[str, ModuleParameters] | None

    def __deepcopy__(self, _: Any) -> Captured:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # a program that is pickled loses its capture
        return type(None), ()


def write_tags(captured: Captured, model: ir.Model) -> None:
    """Tag a model in its current state; existing tags are replaced."""
    capture = captured.capture
    with seam("matching the nodes of the ONNX graph with what the modules ran"):
        record, nodes = capture.finish(model)
    with seam("finding the owners of each node"):
        hierarchy = captured.hierarchy or Hierarchy.from_classes(capture.calls.classes)
        new_tags = make_tags(record, hierarchy, captured.parameters)
    with seam("finding how the weights were made"):
        capture.write_recipes(model)
    with seam("finding the line of the model that created each node"):
        for node in nodes:
            _write_source(node)
    new_tags.write(model, nodes)
    with seam("finding the weights that the graph assumes"):
        capture.record_assumed(model)


def _write_source(node: ir.Node) -> None:
    """Write the innermost line of a node's stack that is outside of torch, unless it is the last one."""
    lines = source_lines(node)
    line = line_of_model(lines)
    is_last = line is not None and line is lines[-1]
    write_source(node.metadata_props, None if is_last else line)


class Rewriting:
    """One tagged model that libraries may rewrite after the export: its tags are then updated.

    They replace values by others, as torch's own optimizer does, so the capture continues.
    """

    _KEY = "htp.rewriting"  # in the model's ``meta``, so that it has the lifetime of the model

    def __init__(self, captured: Captured, model: ir.Model) -> None:
        self._captured = captured
        self._capture = captured.capture
        self._model = model
        self._capture.follow(model)
        self._tagged = _state(model)
        model.meta[self._KEY] = self

    def replaced(self, old: ir.Value | None, new: ir.Value | None) -> None:
        """Record that ``new`` replaces ``old``, in any model."""
        self._capture.step(
            "following a value of a model that is rewritten", self._capture.replaced_later, old, new
        )

    def settle(self) -> None:
        """Update the tags if the model changed; raises a `CaptureError` on failure if strict."""
        now = _state(self._model)
        if now == self._tagged:
            return
        capture = self._capture
        capture.step("tagging a model that was rewritten", write_tags, self._captured, self._model)
        self._tagged = now
        if capture.fault is not None:
            _untag(self._model)
            fault = capture.fault
            capture.fault = None
            self.end()
            if capture.strict:
                raise fault
            export_untagged(fault)

    def end(self) -> None:
        """Discard the capture."""
        self._model.meta.pop(self._KEY, None)
        self._capture.withdraw(self._model)


def _state(model: ir.Model) -> list[Any]:
    """The state of a model that tags depend on: nodes, values (by identity) and their names."""
    from htp_export.exporter.capture.onnx_graph import nodes_of_model

    boundary = [(value, value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
    nodes = list(nodes_of_model(model))
    inputs = [node.inputs for node in nodes]
    return [boundary, nodes, inputs, [_output_names(node) for node in nodes]]


def _output_names(node: ir.Node) -> list[str | None]:
    return [value.name for value in node.outputs]


def _untag(model: ir.Model) -> None:
    from htp_export.exporter.capture.onnx_graph import nodes_of_model

    nodes = list(nodes_of_model(model))
    remove_tags(model, nodes)
    for node in nodes:
        write_source(node.metadata_props, None)


# key in the ``meta`` of FX nodes, which is kept when a graph is copied or changed
_CAPTURED = "htp.captured"


class Dynamo:
    """One export under ``dynamo=True``; ``follow`` is called with a tagged model to be observed."""

    patches = (patches.MODULE_CALLS, patches.REPLACEMENTS, patches.DYNAMO)

    def __init__(
        self,
        model: Any,
        follow: Callable[[Rewriting], None] | None,
        changes: Changes,
    ) -> None:
        from htp_export.exporter.capture.dynamo import DynamoCapture

        self._changes = changes
        self._model = model
        self._follow = follow
        captured = captured_with(model) if isinstance(model, torch.export.ExportedProgram) else None
        self.modules = captured or ModuleNames(model)
        self.capture = captured.capture.resumed() if captured else DynamoCapture.of(self.modules)  # type: ignore[arg-type]

    def run(self, export: Callable[[], Any]) -> Any:
        """Export the ``ONNXProgram``, and tag it."""
        capture = self.capture
        if running.hurries.get():
            patches.FASTER_DYNAMO.hold(self._changes)
            keep_objects(self._changes)
        program = _captured(export, self._model, self._changes, (running.dynamo_capture, capture))
        capture.sources.forget_others()
        hold_collection(self._changes, kept=True)
        captured = Captured(capture, self.modules.hierarchy, self.modules.parameters)
        capture.step("tagging the nodes of the program", write_tags, captured, program.model)
        if capture.fault is not None:
            capture.withdraw(program.model)
            capture.give_up()
        else:
            save_whole(program)
            if self._follow is not None:
                self._follow(Rewriting(captured, program.model))
        return program


class Program:
    """One run of ``torch.export``; its capture is stored in the program."""

    patches = (patches.MODULE_CALLS,)

    def __init__(self, model: Any, changes: Changes) -> None:
        from htp_export.exporter.capture.dynamo import DynamoCapture

        self._changes = changes
        self._model = model
        self.names = ModuleNames(model)
        self.capture = DynamoCapture.of(self.names)

    def run(self, export: Callable[[], Any]) -> Any:
        """Export the program."""
        capture = self.capture
        program = _captured(export, self._model, self._changes, (running.dynamo_capture, capture))
        # An exported graph calls no module: the stacks of its nodes, from the earlier export, are
        # more exact.
        if not torch_internals.has_module_stacks(self._model):
            capture.step("keeping what was captured with the exported program", self._keep, program)
            write = capture.calls.write_stacks
            capture.step(
                "writing the modules of bodies into an exported program",
                write,
                program,
                self.names.hierarchy,
            )
        capture.give_up()
        return program

    def _keep(self, program: Any) -> None:
        self.capture.calls.mark_bodies(program)
        captured = Captured(self.capture.resumed(), self.names.hierarchy, self.names.parameters)
        for node in _nodes(program):
            node.meta[_CAPTURED] = captured


def captured_with(program: Any) -> Captured | None:
    """The capture stored in a program; None without one, or with those of several models."""
    captures: dict[int, Captured] = {}
    for node in _nodes(program):
        captured = node.meta.get(_CAPTURED)
        if captured is not None:
            captures[id(captured)] = captured
    if len(captures) == 1:
        return next(iter(captures.values()))
    return None


def _nodes(program: Any) -> Iterator[Any]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


class TorchScript:
    """One export under ``dynamo=False``."""

    patches = (patches.TORCHSCRIPT, patches.NUMBERS_READ)

    def __init__(
        self,
        model: Any,
        args: Any,
        names_inputs: bool,
        changes: Changes,
    ) -> None:
        self._changes = changes
        self.model = model
        self.args = args
        self.names_inputs = names_inputs
        self.capture = self._new_capture()

    def _new_capture(self, refusal: str = "") -> TorchScriptCapture:
        self.names = ModuleNames(self.model)
        root = RootCalls(self.args, names_inputs=self.names_inputs, refusal=refusal)
        return TorchScriptCapture(self.names, self.model, root)

    def run(self, export: Callable[[], Any]) -> Any:
        """Export with torch's call of the model; if it fails, again with the user's own call.

        torch calls the traced model with flattened, positional arguments, which some models refuse.
        """
        turn_attention_fast_path_off(self._changes)
        keep_training_modes(self._changes, self.model)
        hold_collection(self._changes)
        if running.hurries.get():
            with contextlib.suppress(TorchChangedError):  # then torch does all of its work itself
                patches.FASTER_TORCHSCRIPT.hold(self._changes)
        try:
            return self._attempt(export)
        except (Warning, CaptureError):  # warnings as errors, or an error of the capture
            raise
        except Exception as error:
            refusal = error
            # None if there is nothing else to try: the failed call was the user's own, or complete.
            before = self.capture.root.before
            if before is None:
                raise
        before.put_back()
        strict = self.capture.strict
        # With the error of the first attempt, the capture calls the model as the user did.
        self.capture = self._new_capture(described(refusal))
        self.capture.strict = strict
        try:
            return self._attempt(export)
        except CaptureError:
            raise
        except Exception as error:
            refusal.add_note(
                f"htp_export: a call with the original arguments fails, too: {described(error)}"
            )
            raise refusal from error

    def _attempt(self, export: Callable[[], Any]) -> Any:
        capture = self.capture
        capture.tag = self._tagged
        try:
            return _captured(export, self.model, self._changes, (running.script_capture, capture))
        finally:
            # they refer to the weights, and to each other
            capture.tag = capture.kept = capture.state = None

    def _tagged(self, file: SerializedModel) -> Iterable[bytes | memoryview]:
        with seam("matching the nodes of the ONNX graph with what the modules ran"):
            record, nodes = self.capture.finish(file)
        with seam("finding the owners of each node"):
            hierarchy = self.names.hierarchy or Hierarchy([ModuleInfo("", "")])
            new_tags = make_tags(record, hierarchy, self.names.parameters)
        for node, metadata in zip(nodes, new_tags.of_nodes(), strict=True):
            for key, value in metadata.items():
                node.metadata_props.add(key=key, value=value)
            source = self.capture.sources.get(node.output[0]) if node.output else None
            if source is not None:
                node.metadata_props.add(key=tags.SOURCE, value=source)
        for tensor in file.proto.graph.initializer:
            recipe = self.capture.recipes.get(tensor.name)
            default = default_recipe(tensor.name, ir.DataType(tensor.data_type))
            if recipe is not None and recipe != default:
                tensor.metadata_props.add(key=tags.RECIPE, value=recipe_to_text(recipe))
        metadata = {**new_tags.model}
        if self.capture.state is not None:
            assumed = self.capture.state.assumed(self.capture.recipes.values())
            write_assumed(metadata, assumed)
        for key, value in metadata.items():
            file.proto.metadata_props.add(key=key, value=value)
        file.proto.graph.name = new_tags.graph_name or file.proto.graph.name
        file.proto.ir_version = max(file.proto.ir_version, IR_VERSION)
        return file.chunks()


def _captured(
    export: Callable[[], Any],
    model: Any,
    changes: Changes,
    *captures: tuple[ContextVar[Any], Any],
) -> Any:
    """Run an export while captures observe it.

    The first one keeps the changes made meanwhile, and adds notes to errors.
    """
    capture = captures[0][1]
    capture.changes = changes.inner()
    try:
        for variable, watching in captures:
            set_variable(capture.changes, variable, watching)
        with _named_failure(capture, model):
            return export()
    finally:
        capture.changes.take_back()


@contextlib.contextmanager
def _named_failure(capture: DynamoCapture | TorchScriptCapture, model: Any) -> Iterator[None]:
    """Add to an error the module and the line at which it was raised, and advice."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        called = capture.running if capture.fault is None else ()
        dynamo = not isinstance(capture, TorchScriptCapture)
        by_id = ModuleNames(model).by_id if isinstance(model, torch.nn.Module) else {}
        for note in notes_of_failure(error, by_id, called, dynamo=dynamo):
            error.add_note(f"htp_export: {note}")
        for advice in refused_modules(model, dynamo=dynamo):
            error.add_note(f"htp_export: {advice}")
        raise
