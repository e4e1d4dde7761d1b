"""The modules of a model: their names for the captures, and their training modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from htp_export.exporter.capture.torch_internals import is_compiled
from htp_export.format.hierarchy import Hierarchy, module_paths
from htp_export.format.parameters import ModuleParameters, parameters_of
from htp_export.process.restoring import Changes


class ModuleNames:
    """The module paths of a model by identity, and by every registered name."""

    def __init__(self, model: Any) -> None:
        import torch

        # ``id(module.__dict__)`` → module path. torch's tracer wraps modules in objects that share
        # their ``__dict__``; a module registered under several names has the first of them.
        self.paths: dict[int, str] = {}
        # every name under which a module is registered → its path
        self.aliases: dict[str, str] = {}
        self._model = model if isinstance(model, torch.nn.Module) else None
        self.by_id: dict[int, str] = {}  # ``id(module)`` → module path
        self._seen: list[Any] = []  # keeps the modules alive, so that their ids stay unique
        for path, module in self._named():
            self.by_id[id(module)] = self.paths.setdefault(id(module.__dict__), path)
            self._seen.append(module)
        if self._model is not None:
            for name, module in self._model.named_modules(remove_duplicate=False):
                # a class with an ``__eq__``: torch leaves out a module that is equal to another one
                if id(module) in self.by_id:
                    self.aliases.setdefault(name, self.by_id[id(module)])

    def _named(self) -> Iterable[tuple[str, Any]]:
        if self._model is None:
            return ()
        return ((path, module) for path, _, module in module_paths(self._model))

    @property
    def hierarchy(self) -> Hierarchy | None:
        """The current module tree, in the order of ``named_modules()``; None without a module."""
        if self._model is None:
            return None
        return Hierarchy.from_module(self._model)

    @property
    def parameters(self) -> dict[str, ModuleParameters] | None:
        """Module path → its current parameters; None without an ``nn.Module``."""
        if self._model is None:
            return None
        return parameters_of(self._model)

    def state_name(self, name: str) -> str:
        """The name of a parameter or buffer under the path of its module, which may have other names."""
        module, _, own = name.rpartition(".")
        path = self.aliases.get(module, module)
        # a path with a number, ``block#2``, is no name of PyTorch
        return f"{path}.{own}" if path in self.aliases and path else name

    def without_model(self) -> ModuleNames:
        """The same names, without keeping the modules alive."""
        other = ModuleNames(None)
        other.aliases = self.aliases
        other.by_id = self.by_id
        return other

    def path_now(self, module: Any) -> str | None:
        """The path of a module, which may have been registered since; None for other modules."""
        key = id(module.__dict__)
        if key not in self.paths:
            path = self._registered_path(module)
            if path is None:
                return None
            self._seen.append(module)
            self.paths[key] = self.by_id[id(module)] = path
        return self.paths[key]

    def _registered_path(self, module: Any) -> str | None:
        for path, registered in self._named():
            if registered.__dict__ is module.__dict__:
                return path
        return None


def keep_training_modes(changes: Changes, model: Any) -> None:
    """Restore every module's training mode: torch's TorchScript exporter sets the root's on all."""
    import torch

    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    # a frozen module has no mode
    modules = [module for module in modules if hasattr(module, "training")]
    modes = [module.training for module in modules]

    def put_back() -> None:
        for module, mode in zip(modules, modes, strict=True):
            if module.training != mode:
                module.training = mode

    changes.will_undo(put_back)


def set_eval_mode(model: Any) -> None:
    """Set a model to eval mode, unless it is the module of an ``ExportedProgram``, which raises."""
    with contextlib.suppress(NotImplementedError):
        model.eval()


def refused_modules(model: Any, *, dynamo: bool) -> Iterator[str]:
    """Advice for an export that failed, on modules that torch's exporters reject inside others."""
    import torch

    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield (
                f"module {path!r} is a ScriptModule, which torch exports only within one: put the original module in "
                "its place, or export torch.jit.trace(model, inputs) with dynamo=False"
            )
            return
        if not dynamo and is_compiled(module):
            yield (
                f"module {path or '(the root)'!r} is compiled, which TorchScript cannot trace: use dynamo=True, or "
                "put the original module in its place"
            )
            return
