"""The module tree: every module of a model with its class, its number of calls and its fate.

It is created from an ``nn.Module`` and written into ONNX files as ``htp.modules``; see
``docs/format.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from htp_export.format import tags
from htp_export.format.bounds import CALLS_OF_A_NODE, MOST_CALLS
from htp_export.format.fates import Fate

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree.

    Attributes:
        path: Its name in ``named_modules()``, with a suffix if an earlier module has the same name;
            ``""`` for the root.
        class_name: Its fully qualified class, ``torch.nn.modules.linear.Linear``; ``""`` if
            unknown.
        calls: Number of runs of its ``forward`` during the export.
        fate: Its fate, or the name of one; by default, the fate that follows from ``calls``.
        fused_with: For ``fused``: the paths of the modules with which it was merged.
        torch_name: Its name in ``named_modules()``, if that differs from the path; else None.
        synthetic: Whether it is not a module of the model but a step of one, which
            `decomposed_attention` has created.
    """

    path: str
    class_name: str
    calls: int = 0
    fate: Fate = field(default="")  # type: ignore[assignment] # see __post_init__
    fused_with: tuple[str, ...] = ()
    torch_name: str | None = field(default=None, repr=False)
    synthetic: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Convert the name of a fate to a `Fate`."""
        if type(self.fate) is Fate:
            return
        fate = Fate(self.fate) if self.fate else Fate.of_calls(self.calls)
        object.__setattr__(self, "fate", fate)

    @property
    def simple_class(self) -> str:
        """The name of the class without its Python module."""
        return self.class_name.rpartition(".")[2]

    @property
    def is_generated(self) -> bool:
        """Whether torch generated the class when it traced a model, so that it is independent of the model.

        Examples:
            >>> ModuleInfo("", "torch.fx.graph_module.GraphModule").is_generated
            True
        """
        return self.class_name.startswith(_GENERATED)

    def may_be(self, other: ModuleInfo) -> bool:
        """Return whether two entries with the same path can be the same module, by their classes.

        Unknown and generated classes match any class.

        Examples:
            >>> net, relu = ModuleInfo("", "nets.Net"), ModuleInfo("", "torch.nn.modules.activation.ReLU")
            >>> net.may_be(ModuleInfo("", "moved.Net")), net.may_be(relu), net.may_be(ModuleInfo("", ""))
            (True, False, True)
        """
        for module in (self, other):
            if not module.class_name or module.is_generated:
                return True
        return self.simple_class == other.simple_class

    def with_results(
        self, calls: int, fate: Fate | None = None, fused_with: tuple[str, ...] | None = None
    ) -> ModuleInfo:
        """Return the module with results of an export; arguments that are None are unchanged.

        In half the time of ``replace``, which an export calls for every module.
        """
        return ModuleInfo(
            self.path,
            self.class_name,
            calls,
            self.fate if fate is None else fate,
            self.fused_with if fused_with is None else fused_with,
            self.torch_name,
            self.synthetic,
        )

    def counted(self, calls: int) -> ModuleInfo:
        """Return the module with another number of calls; its fate becomes ``uncalled`` if that is 0 now."""
        if self.calls and not calls:
            return replace(self, calls=0, fate=Fate.of_calls(0), fused_with=())
        return replace(self, calls=calls)


_GENERATED = ("torch.fx.graph_module.", "torch.export.", "torch.nn.modules.module.Module")


class Hierarchy(Mapping[str, ModuleInfo]):
    """An immutable mapping of module paths to modules, in the order of ``named_modules()``; ``"."`` is the root, too.

    Args:
        modules: The modules, including the root, with distinct paths.

    Raises:
        ValueError: If there is no root, or a path is repeated.

    Examples:
        >>> tree = Hierarchy([ModuleInfo("", "net.Net", 1), ModuleInfo("fc", "torch.nn.Linear")])
        >>> list(tree), tree["fc"].fate, tree.children(""), tree.called
        (['', 'fc'], 'uncalled', ('fc',), frozenset({''}))
    """

    def __init__(self, modules: Iterable[ModuleInfo]) -> None:
        listed = list(modules)
        self._modules = {module.path: module for module in listed}
        if len(self._modules) < len(listed):
            raise ValueError("a module path is repeated")
        if "" not in self._modules:
            raise ValueError("there is no root module")

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> Hierarchy:
        """Return the tree of a PyTorch model before it ran: no calls, every fate ``uncalled``.

        A module with several names is listed under the first one. Several modules with the same
        name have distinct paths; see ``ModuleInfo.torch_name``.

        Examples:
            >>> import torch
            >>> list(Hierarchy.from_module(torch.nn.Sequential(torch.nn.ReLU())).classes.items())
            [('', 'torch.nn.modules.container.Sequential'), ('0', 'torch.nn.modules.activation.ReLU')]
        """
        return cls(
            ModuleInfo(
                path,
                _class_name(child),
                torch_name=None if name == path else name,
                synthetic=bool(getattr(type(child), "htp_synthetic", False)),
            )
            for path, name, child in module_paths(module)
        )

    @classmethod
    def from_classes(cls, classes: Mapping[str, str]) -> Hierarchy:
        """Return a tree of the modules in a map from path to class, with all their ancestors.

        Examples:
            >>> list(Hierarchy.from_classes({"layer.0.fc": "torch.nn.modules.linear.Linear"}).classes)
            ['', 'layer', 'layer.0', 'layer.0.fc']
        """
        return cls([ModuleInfo("", classes.get("", ""))]).including(
            dict.fromkeys(classes, 0), classes
        )

    @classmethod
    def from_json(cls, text: str) -> Hierarchy:
        """Parse the value of ``htp.modules``; a ValueError names the module at fault. Unknown keys are ignored.

        Examples:
            >>> Hierarchy.from_json('{"": {"class": "net.Net", "calls": 1, "fate": "computed"}}').root.calls
            1
        """
        entries = tags.json_object(tags.MODULES, text, "module paths")
        return cls(_module_from_json(path, entry) for path, entry in entries.items())

    def check_calls(self, nodes: Callable[[], int]) -> None:
        """Refuse (``ValueError``) too many calls for a file; ``nodes`` returns its number of nodes."""
        calls = sum(module.calls for module in self.values())
        if calls > MOST_CALLS and calls > CALLS_OF_A_NODE * nodes():
            most = max(self.values(), key=lambda module: module.calls)
            raise ValueError(
                f"its modules have {calls:,} calls, {most.calls:,} of them module {most.path!r}: "
                "too many for its number of nodes"
            )

    def to_json(self) -> str:
        """Return the value of ``htp.modules``."""
        entries: dict[str, dict[str, Any]] = {}
        for module in self.values():
            entry: dict[str, Any] = {
                "class": module.class_name,
                "calls": module.calls,
                "fate": module.fate,
            }
            if module.fate.is_merged:
                entry["with"] = list(module.fused_with)
            if module.torch_name is not None:
                entry["name"] = module.torch_name
            if module.synthetic:
                entry["synthetic"] = True
            entries[module.path] = entry
        return tags.json_text(entries)

    def with_results(
        self,
        *,
        calls: Mapping[str, int] | None = None,
        fates: Mapping[str, str] | None = None,
        fused_with: Mapping[str, Sequence[str]] | None = None,
    ) -> Hierarchy:
        """Return the tree with results of an export; modules that are missing in a mapping keep their values.

        Examples:
            >>> tree = Hierarchy([ModuleInfo("", "net.Net"), ModuleInfo("bn", "torch.nn.BatchNorm2d")])
            >>> tree.with_results(calls={"bn": 1}, fates={"bn": "fused"}, fused_with={"bn": ["conv"]})["bn"]
            ModuleInfo(path='bn', class_name='torch.nn.BatchNorm2d', calls=1, fate='fused', fused_with=('conv',))
        """
        calls, fates, fused_with = calls or {}, fates or {}, fused_with or {}
        modules = []
        for path, module in self.items():
            count = calls.get(path, module.calls)
            fate = fates.get(path, module.fate)
            if type(fate) is not Fate:
                fate = Fate(fate)
            partners = tuple(fused_with.get(path, module.fused_with)) if fate.is_merged else ()
            modules.append(module.with_results(count, fate, partners))
        return Hierarchy(modules)

    def including(
        self, calls: Mapping[str, int], classes: Mapping[str, str] | None = None
    ) -> Hierarchy:
        """Return the tree with further modules, for files with tags of modules that are not in the tree.

        ``calls``: module path → number of calls. Existing modules are unchanged. A missing ancestor
        is added as a container, which never runs.

        Examples:
            >>> tree = Hierarchy([ModuleInfo("", "net.Net", 1)]).including({"layer.0": 2})
            >>> [(path, module.calls) for path, module in tree.items()]
            [('', 1), ('layer', 0), ('layer.0', 2)]
        """
        modules, seen = dict(self._modules), set[str]()
        for path in calls:
            unseen = list(itertools.takewhile(lambda up: up not in seen, tags.ancestors(path)))
            seen.update(unseen)
            for up in reversed(unseen):
                if up not in modules:
                    modules[up] = ModuleInfo(up, (classes or {}).get(up, ""), calls.get(up, 0))
        return Hierarchy(modules.values())

    def __getitem__(self, path: str) -> ModuleInfo:
        try:
            return self._modules[path]
        except KeyError:
            if path == ".":  # the root, as in selectors
                return self._modules[""]
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        return f"<Hierarchy of {self.root.class_name or 'an unnamed model'}, {len(self)} modules>"

    @property
    def root(self) -> ModuleInfo:
        """The model itself."""
        return self._modules[""]

    @cached_property
    def called(self) -> frozenset[str]:
        """The paths of the modules whose ``forward`` ran."""
        return frozenset(path for path, module in self.items() if module.calls > 0)

    @cached_property
    def classes(self) -> Mapping[str, str]:
        """Module path → fully qualified class, in order: the argument of ``selectors.select``."""
        return {path: module.class_name for path, module in self.items()}

    def parent(self, path: str) -> str | None:
        """Return the nearest ancestor of a path that is a module; None for the root."""
        return tags.nearest_above(path, self._modules)

    def children(self, path: str) -> tuple[str, ...]:
        """Return the paths of the children of a module, in order."""
        return self._children[path]

    @cached_property
    def _children(self) -> dict[str, tuple[str, ...]]:
        children_of: dict[str, list[str]] = {path: [] for path in self}
        for path in self:
            parent = self.parent(path)
            if parent is not None:
                children_of[parent].append(path)
        return {path: tuple(children) for path, children in children_of.items()}


def _module_from_json(path: str, entry: object) -> ModuleInfo:
    if not isinstance(entry, dict):
        raise ValueError(f"{tags.MODULES}: module {path!r} is not a JSON object")  # noqa: TRY004 - it is a bad value
    class_name, calls, fate = entry.get("class"), entry.get("calls"), entry.get("fate")
    partners = entry.get("with", [])
    torch_name = entry.get("name")
    synthetic = entry.get("synthetic", False)
    if not isinstance(class_name, str):
        problem = f"'class' is not a string: {class_name!r}"
    elif type(calls) is not int or calls < 0:
        problem = f"'calls' is not a count: {calls!r}"
    elif fate not in tuple(Fate):
        problem = f"'fate' is none of {', '.join(Fate)}: {fate!r}"
    elif not isinstance(partners, list) or not all(isinstance(other, str) for other in partners):
        problem = f"'with' is not a list of module paths: {partners!r}"
    elif not (torch_name is None or isinstance(torch_name, str)):
        problem = f"'name' is not a string: {torch_name!r}"
    elif not isinstance(synthetic, bool):
        problem = f"'synthetic' is neither true nor false: {synthetic!r}"
    else:
        known_fate = Fate(fate)
        fused_with = tuple(partners) if known_fate.is_merged else ()
        return ModuleInfo(path, class_name, calls, known_fate, fused_with, torch_name, synthetic)
    raise ValueError(f"{tags.MODULES}: module {path!r}: {problem}")


def _class_name(module: torch.nn.Module) -> str:
    """Return the fully qualified class; for a scripted module, the name of the original class."""
    kind = type(module)
    if kind.__module__.startswith("torch.jit"):
        original_name = getattr(module, "original_name", None)
        if original_name:
            return str(original_name)
    # a GraphModule has a class of its own, whose __name__ alone is that of the traced class
    is_renamed = kind.__qualname__.rpartition(".")[2] != kind.__name__
    return f"{kind.__module__}.{kind.__name__ if is_renamed else kind.__qualname__}"


class ModulePath(NamedTuple):
    """A module, its unique path, and its name in ``named_modules()``."""

    path: str
    name: str
    module: nn.Module


def module_paths(model: nn.Module) -> list[ModulePath]:
    """Return every module of a model, once, in the order of ``named_modules()``.

    The path of a module is its name. If an earlier module has the same name, ``#2``, ``#3``, ... is
    added to it, and so to the paths of its descendants.

    Examples:
        >>> import torch
        >>> model = torch.nn.Module()
        >>> model._modules[""] = torch.nn.Sequential(torch.nn.ReLU())
        >>> [(path, name) for path, name, _ in module_paths(model)]
        [('', ''), ('#2', ''), ('#2.0', '0')]
    """
    named = list(model.named_modules())
    if len({name for name, _ in named}) == len(named):
        return [ModulePath(name, name, module) for name, module in named]
    return list(_unique(model, "", "", set(), set()))


def _unique(
    module: nn.Module, path: str, name: str, taken: set[str], seen: set[int]
) -> Iterator[ModulePath]:
    """Iterate over a module and its descendants, in the order of ``named_modules()``."""
    unique_path = path
    numbers = itertools.count(2)
    while unique_path in taken:
        unique_path = f"{path}#{next(numbers)}"
    path = unique_path
    taken.add(path)
    seen.add(id(module))
    yield ModulePath(path, name, module)
    for key, child in module._modules.items():
        if child is not None and id(child) not in seen:
            yield from _unique(child, _joined(path, key), _joined(name, key), taken, seen)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
