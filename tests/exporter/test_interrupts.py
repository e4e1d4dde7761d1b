"""A `KeyboardInterrupt` between any two lines of what changes torch and takes it back leaves nothing changed."""

import collections
import gc
import io
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _core

import htp_export
from htp_export.capabilities.verify import pytorch_run
from htp_export.exporter import capture_session
from htp_export.exporter import exporting as exporter
from htp_export.exporter.capture import (
    bodies,
    modules,
    patches,
    patching,
    running,
    torch_internals,
    torchscript,
    torchscript_patches,
)
from htp_export.process import restoring
from tests.exporting import quick

# The modules of which every line counts, and single functions of others.
WHOLE = (restoring, running, patching, exporter, capture_session)
SINGLE = {
    modules: {"keep_training_modes", "put_back"},
    patches: {"translations_read_once", "make"},
    bodies: {"watch_bodies"},
    torch_internals: {"turn_compilation_off", "keep_autocast_cache", "run_after_hooks", "last"},
    torchscript: {"begins_trace", "returns"},
    torchscript_patches: {"trace"},
    pytorch_run: {"evaluating"},
}
FUNCTIONS = {module.__file__: None for module in WHOLE} | {
    module.__file__: names for module, names in SINGLE.items()
}
PATCHED = [patch for group in patches.EVERY for patch in group.patches]
VARIABLES = (
    running.exporter,
    running.dynamo_capture,
    running.script_capture,
    running.translations_read,
)


def is_watched(code: CodeType) -> bool:
    if code.co_filename not in FUNCTIONS:
        return False
    names = FUNCTIONS[code.co_filename]
    return names is None or code.co_name in names


class Interrupts:
    """Runs something, and interrupts it before one of its lines.

    Attributes:
        lines: How often each line was reached so far, by file and number.
    """

    def __init__(self, at: tuple[str, int, int] | None = None) -> None:
        self.at = at
        self.lines: collections.Counter[tuple[str, int]] = collections.Counter()

    def run(self, do: Callable[[], Any]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            do()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if event == "call" and is_watched(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            if self.at == (*place, self.lines[place]):
                raise KeyboardInterrupt
            self.lines[place] += 1
        return self._line


class Watched(nn.Module):
    """Has a part in another training mode, a user's hook, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Dropout())
        self.fc.register_forward_hook(lambda _module, _args, out: out.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x))


@pytest.fixture(scope="module", autouse=True)
def nothing_frozen(cycles_collected: None) -> Iterator[None]:
    """Exports move many objects into the oldest generation, and only in a process that has frozen none."""
    gc.unfreeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "_OBJECTS", 0)
        patch.setattr(restoring, "_has_frozen_objects", lambda: gc.get_freeze_count() > 0)
        yield
    gc.freeze()


def state(model: nn.Module | None = None) -> dict[str, Any]:
    """Everything that an export changes for a while, of torch and of a model."""
    found: dict[str, Any] = {}
    for patch in PATCHED:
        owner, name, _ = patch.find()
        # None: a class inherits it
        found[f"{patch.module}.{patch.name}"] = vars(owner).get(name)
    for variable in VARIABLES:
        found[variable.name] = variable.get()
    for path, module in () if model is None else model.named_modules():
        found[f"mode of {path}"] = module.training
        found[f"hooks of {path}"] = len(module._forward_hooks), len(module._forward_pre_hooks)
        found[f"attributes of {path}"] = set(vars(module))
    found["call of a module"] = nn.Module.__call__
    found["traced modules"] = torch.jit._trace._trace_module_map
    found["torch.onnx.export"] = torch.onnx.export
    found["collector"] = gc.isenabled(), gc.get_freeze_count() > 0
    found["fast path"] = torch.backends.mha.get_fastpath_enabled()
    found["gradients"] = torch.is_grad_enabled()
    found["autocast cache"] = torch.is_autocast_cache_enabled()
    return found


def changed_since(before: dict[str, Any], model: nn.Module | None = None) -> list[str]:
    """The names of what is not as it was."""
    return [name for name, value in state(model).items() if value != before[name]]


def interrupted_everywhere(do: Callable[[], Any], model: nn.Module) -> tuple[int, list[str]]:
    """Interrupt something before each line, the first and the last time that it is reached.

    Returns:
        How often it was interrupted, and what was changed afterwards: nothing, if all is well.
    """
    plain, before = Interrupts(), state(model)
    assert not plain.run(do)
    count, changed = 0, []
    for (file, line), times in sorted(plain.lines.items()):
        for nth in {0, times - 1}:
            if not Interrupts((file, line, nth)).run(do):
                continue
            count += 1
            where = f"{file.rpartition('/')[2]}:{line}, time {nth}"
            changed += [f"{name} ({where})" for name in changed_since(before, model)]
            if changed:
                return count, changed
    return count, changed


def in_another_thread(do: Callable[[], Any]) -> bool:
    """Whether it ends there: nobody holds a lock."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(do()), daemon=True)
    thread.start()
    thread.join(60)
    return bool(done)


@contextmanager
def switches(enabled: bool) -> Iterator[None]:
    """The collector, attention's fast path and autocast's cache on or off before the export."""
    (gc.enable if enabled else gc.disable)()
    torch.backends.mha.set_fastpath_enabled(enabled)
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        gc.enable()
        torch.backends.mha.set_fastpath_enabled(True)
        torch.set_autocast_cache_enabled(True)


def watched_model() -> nn.Module:
    model = Watched().eval()
    model.act.train()
    return model


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("way", "enabled"),
    quick(itertools.product(("export", "tagging"), (True, False)), ("tagging", False)),
)
def test_an_interrupted_torchscript_export_leaves_nothing_changed(way, enabled):
    model, args = watched_model(), (torch.linspace(-1, 1, 8).reshape(2, 4),)

    def export() -> None:
        if way == "export":
            htp_export.export(model, args, io.BytesIO(), dynamo=False, verbose=False)
        else:
            with htp_export.tagging():
                torch.onnx.export(model, args, io.BytesIO(), dynamo=False, verbose=False)

    with switches(enabled):
        count, changed = interrupted_everywhere(export, model)
        assert changed == []
        assert count > 150
        assert in_another_thread(lambda: export() or True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("enabled", quick([True, False], False))
def test_an_interrupted_dynamo_export_leaves_nothing_changed(enabled, monkeypatch):
    """With a stand-in for what torch does in between: a true export takes seconds, and is interrupted often."""
    model = watched_model()

    def translated() -> Any:
        x = ir.Value(name="x")
        graph = ir.Graph([x], [x], nodes=[], opset_imports={"": 18})
        return torch.onnx.ONNXProgram(ir.Model(graph, ir_version=10), None)  # type: ignore[arg-type]

    monkeypatch.setattr(_core, "_exported_program_to_onnx_program", translated)
    monkeypatch.setattr(_core, "export", lambda *_, **__: _core._exported_program_to_onnx_program())  # type: ignore[call-arg]

    def export() -> None:
        htp_export.export(model, (torch.ones(2, 4),), dynamo=True, verbose=False)

    with switches(enabled), patches.translations_read_once():
        count, changed = interrupted_everywhere(export, model)
        assert changed == []
        assert count > 100
        assert in_another_thread(lambda: export() or True)


class NoGrad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x.sin()


def test_an_interrupt_while_bodies_are_watched_gives_them_their_own_code_back():
    program = torch.export.export(NoGrad(), (torch.ones(2),)).module()

    def watch() -> None:
        with restoring.restored(
            lambda changes: bodies.watch_bodies(changes, program, lambda *_: None)
        ):
            pass

    assert list(bodies.bodies_run_in_place(program))
    count, changed = interrupted_everywhere(watch, program)
    assert (count > 5, changed) == (True, [])


def test_an_interrupt_around_a_comparison_leaves_nothing_changed():
    model = watched_model()

    def evaluate() -> None:
        with pytorch_run.evaluating(model):
            pass

    count, changed = interrupted_everywhere(evaluate, model)
    assert (count > 20, changed) == (True, [])
