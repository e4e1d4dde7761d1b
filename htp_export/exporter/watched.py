"""What runs in the place of torch's exporters while tags are wanted: the export itself, watched, then its tags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import onnx_ir as ir
import torch

from htp_export.errors import CaptureError, described
from htp_export.exporter.capture import patches, running, torch_internals
from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.modules import ModuleNames, keep_training_modes, refused_modules
from htp_export.exporter.capture.programs import Captured, ProgramBodies, captured_with
from htp_export.exporter.capture.root_call import RootCalls
from htp_export.exporter.capture.running import seam
from htp_export.exporter.capture.saving import save_whole
from htp_export.exporter.capture.torchscript import TorchScriptCapture
from htp_export.exporter.owners.write import make_tags
from htp_export.exporter.rewriting import IR_VERSION, Rewriting, write_tags
from htp_export.files.protobuf_bytes import SerializedModel
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.recipes import recipe_to_text
from htp_export.process.restoring import Changes, hold_collection, set_variable, turn_attention_fast_path_off


class Dynamo:
    """One export under ``dynamo=True``; ``follow`` takes the tagged model, if changes of it are to be followed."""

    patches = (patches.MODULE_CALLS, patches.REPLACEMENTS, patches.DYNAMO)

    def __init__(self, model: Any, follow: Callable[[Rewriting], None] | None, changes: Changes) -> None:
        self._changes, self._model, self._follow = changes, model, follow
        captured = captured_with(model) if isinstance(model, torch.export.ExportedProgram) else None
        self.modules = captured or _names_of(model, changes)
        self.capture = captured.capture.resumed() if captured else DynamoCapture.of(self.modules)  # type: ignore[arg-type]

    def run(self, export: Callable[[], Any]) -> Any:
        """Make the ``ONNXProgram``, and tag it."""
        capture = self.capture
        program = _captured(export, self._model, self._changes, (running.dynamo_capture, capture))
        hold_collection(self._changes, kept=True)
        hierarchy, parameters = self.modules.hierarchy, self.modules.parameters
        capture.step("tagging the nodes of the program", write_tags, capture, program.model, hierarchy, parameters)
        if capture.fault is not None:
            capture.withdraw(program.model)
            capture.give_up()
        else:
            save_whole(program)
            if self._follow is not None:
                self._follow(Rewriting(capture, program.model, hierarchy, parameters))
        return program


class Program:
    """One run of ``torch.export``: what is captured is kept with the program that it makes."""

    patches = (patches.MODULE_CALLS,)

    def __init__(self, model: Any, changes: Changes) -> None:
        self._changes, self._model = changes, model
        self.names = _names_of(model, changes)
        self.capture = DynamoCapture.of(self.names)

    def run(self, export: Callable[[], Any]) -> Any:
        """Make the program."""
        capture, bodies = self.capture, ProgramBodies()
        capture.step("reading the names of the modules in bodies", bodies.begin, self._model)
        variables = (running.dynamo_capture, capture), (running.program_bodies, bodies)
        program = _captured(export, self._model, self._changes, *variables)
        capture.fault = capture.fault or bodies.fault
        capture.step("keeping what was captured with the exported program", self._keep, program)
        capture.step("writing the modules of bodies into an exported program", bodies.write, program)
        capture.give_up()
        return program

    def _keep(self, program: Any) -> None:
        if torch_internals.has_module_stacks(self._model):
            return  # an exported graph calls no module: the stacks that its nodes have from the earlier export say more
        self.capture.calls.mark_bodies(program)
        Captured(self.capture.resumed(), self.names.hierarchy, self.names.parameters).keep_with(program)


class TorchScript:
    """One export under ``dynamo=False``."""

    patches = (patches.TORCHSCRIPT,)

    def __init__(self, model: Any, args: Any, names_inputs: bool, changes: Changes) -> None:
        self._changes = changes
        self.model, self.args, self.names_inputs = model, args, names_inputs
        self.capture = self._new_capture()

    def _new_capture(self, refusal: str = "") -> TorchScriptCapture:
        self.names = ModuleNames(self.model)
        root = RootCalls(self.args, names_inputs=self.names_inputs, refusal=refusal)
        return TorchScriptCapture(self.names, self.model, root)

    def run(self, export: Callable[[], Any]) -> Any:
        """Export with the call that torch makes; once more, with the call as given, where torch refuses it."""
        turn_attention_fast_path_off(self._changes)
        keep_training_modes(self._changes, self.model)
        hold_collection(self._changes)
        try:
            return self._attempt(export)
        except (Warning, CaptureError):  # a warning that the user made an error, or a fault of ours
            raise
        except Exception as error:
            refusal, before = error, self.capture.root.before
            if before is None:
                raise
        before.put_back()
        strict = self.capture.strict
        self.capture = self._new_capture(described(refusal))
        self.capture.strict = strict
        try:
            return self._attempt(export)
        except CaptureError:
            raise
        except Exception as error:
            refusal.add_note(f"htp_export: called as the arguments were given, it fails too: {described(error)}")
            raise refusal from error

    def _attempt(self, export: Callable[[], Any]) -> Any:
        capture = self.capture
        capture.tag = self._tagged
        try:
            return _captured(export, self.model, self._changes, (running.script_capture, capture))
        finally:
            capture.tag = capture.kept = None  # they hold the weights, and each other

    def _tagged(self, file: SerializedModel) -> Iterable[bytes | memoryview]:
        with seam("matching the nodes of the ONNX graph with what the modules ran"):
            record, nodes = self.capture.finish(file)
        with seam("finding the owners of each node"):
            made = make_tags(record, self.names.hierarchy or Hierarchy([ModuleInfo("", "")]), self.names.parameters)
        for node, metadata in zip(nodes, made.nodes, strict=True):
            for key, value in metadata.items():
                node.metadata_props.add(key=key, value=value)
        for tensor in file.proto.graph.initializer:
            if tensor.name in self.capture.recipes and ir.DataType(tensor.data_type).is_floating_point():
                recipe = recipe_to_text(self.capture.recipes[tensor.name])
                tensor.metadata_props.add(key=tags.RECIPE, value=recipe)
        for key, value in made.model.items():
            file.proto.metadata_props.add(key=key, value=value)
        file.proto.graph.name = made.graph_name or file.proto.graph.name
        file.proto.ir_version = max(file.proto.ir_version, IR_VERSION)
        return file.chunks()


def _names_of(model: Any, changes: Changes) -> ModuleNames:
    """The names of a model's modules, read without garbage collections."""
    reading = changes.inner()
    hold_collection(reading, kept=True)
    names = ModuleNames(model)
    reading.take_back()
    return names


def _captured(export: Callable[[], Any], model: Any, changes: Changes, *captures: tuple[ContextVar[Any], Any]) -> Any:
    """Run an export while captures watch it; the first one holds what is changed meanwhile, and names its failure."""
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
    """Add to an error which module was running, and what to do about modules that torch refuses."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        called = capture.running if capture.fault is None else ()
        if called:
            error.add_note(f"htp_export: while module {called[-1] or '(the root)'!r} was running")
        for advice in refused_modules(model, dynamo=isinstance(capture, DynamoCapture)):
            error.add_note(f"htp_export: {advice}")
        raise
