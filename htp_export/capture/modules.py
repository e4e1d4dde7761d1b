"""The names of a model's modules, as the captures need them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from htp_export.hierarchy import Hierarchy
from htp_export.parameters import Held, parameters_of


class ModuleNames:
    """A model's modules under every name that leads to them.

    Attributes:
        paths: ``id(module.__dict__)`` → module path. torch's tracer wraps modules in objects that share their
            ``__dict__``, and a module registered under several names has the first of them.
        aliases: Every name under which a module is registered → its path.
        hierarchy: The module tree, in the order of ``named_modules()``; None for what is no ``nn.Module``.
        parameters: Module path → the parameters it holds; None for what is no ``nn.Module``.
    """

    def __init__(self, model: Any) -> None:
        self.paths: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.hierarchy: Hierarchy | None = None
        self.parameters: dict[str, Held] | None = None
        self._model = model
        self._seen: list[Any] = []  # kept, so that their ids are nobody else's
        self.look_again()

    def look_again(self) -> None:
        """Take in what the model has become: its ``forward`` may have put other modules in place."""
        import torch

        if not isinstance(self._model, torch.nn.Module):
            return
        for name, module in self._model.named_modules(remove_duplicate=False):
            self.aliases[name] = self.paths.setdefault(id(module.__dict__), name)
            self._seen.append(module)
        self.hierarchy = Hierarchy.from_module(self._model)
        self.parameters = parameters_of(self._model)

    def path_now(self, module: Any) -> str | None:
        """The path of a module that may have been put in place after the names were taken; None if it is none."""
        known = self.paths.get(id(module.__dict__))
        if known is not None or self.hierarchy is None:
            return known
        self._seen.append(module)
        found = next((str(name) for name, each in self._model.named_modules() if each is module), None)
        if found is not None:
            self.paths[id(module.__dict__)] = found
        return found


@contextlib.contextmanager
def training_modes_kept(model: Any) -> Iterator[None]:
    """Give every module its own training mode back: torch's TorchScript exporter sets the root's on all of them."""
    import torch

    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            if module.training != mode:
                module.training = mode
