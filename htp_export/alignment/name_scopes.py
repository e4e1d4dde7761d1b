"""Scopes in the names of nodes, such as ``/model/layers.0/attn/MatMul``, and their modules.

A name alone proves nothing. A scope is proved to be a module's if the nodes in it whose owners are
known are exactly the nodes of the module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

from htp_export.format.tags import common_ancestor, is_under

Scope = tuple[str, ...]


def scope_of(*names: str) -> Scope | None:
    """The components of the first name that is a path, except the last; None without a path.

    Examples:
        >>> scope_of("node_12", "/layers.0/attn/MatMul_output_0")
        ('layers.0', 'attn')
        >>> scope_of("/Add"), scope_of("reshape_3")
        ((), None)
    """
    for name in names:
        if "/" in name:
            return tuple(part for part in name.split("/") if part)[:-1]
    return None


class NameScopes:
    """The modules that scopes are proved to name.

    Args:
        known: Scope and known owners of each node that has both.
        modules: Paths of the modules that ran.

    Examples:
        >>> known = [
        ...     (("h.0", "q"), ("layer.0.query",)),
        ...     (("h.0", "k"), ("layer.0.key",)),
        ...     (("h.1",), ("layer.1",)),
        ... ]
        >>> modules = {"layer.0", "layer.0.query", "layer.0.key", "layer.1", "layer.0.act"}
        >>> scopes = NameScopes(known, modules)
        >>> scopes.module(("h.0",)), scopes.module(("h.0", "act")), scopes.module(("h.2",))
        ('layer.0', 'layer.0.act', None)
    """

    def __init__(
        self, known: Sequence[tuple[Scope, tuple[str, ...]]], modules: Container[str]
    ) -> None:
        self._modules = modules
        nodes: list[tuple[Scope, str]] = []
        # scope → the owners of the nodes in it, at any depth
        inside: defaultdict[Scope, list[str]] = defaultdict(list)
        # scope → the owners of the nodes directly in it
        direct: defaultdict[Scope, set[str]] = defaultdict(set)
        for scope, owners in known:
            owner = owners[0] if len(owners) == 1 else common_ancestor(owners)
            nodes.append((scope, owner))
            direct[scope].add(owner)
            for length in range(len(scope) + 1):
                inside[scope[:length]].append(owner)
        self._has_known = frozenset(inside)
        self._module_of: dict[Scope, str] = {}
        for scope, owners_inside in inside.items():
            module = self._named_module(scope, owners_inside, direct.get(scope, set()))
            if module is not None and self._has_all_nodes(scope, module, nodes):
                self._module_of[scope] = module

    def _named_module(self, scope: Scope, owners: Sequence[str], direct: set[str]) -> str | None:
        """The innermost module around the owners in a scope, if they prove that the scope is the whole module.

        The nodes directly in the scope are all of the module. Without such nodes, there are nodes of
        several owners, or the last component of scope and path is the same.

        Args:
            scope: The scope.
            owners: The owners of the nodes in it, at any depth.
            direct: The owners of the nodes directly in it.
        """
        module = common_ancestor(owners)
        if module not in self._modules:
            return None
        if direct:
            return module if direct == {module} else None
        if not scope:
            return None
        has_several_owners = len(set(owners)) > 1 or owners[0] != module
        last = module.rpartition(".")[2]
        has_same_name = bool(module) and scope[-1].rpartition(".")[2] == last
        return module if has_several_owners or has_same_name else None

    def module(self, scope: Scope | None) -> str | None:
        """The module that a scope names; None if that is not proved.

        A scope without known nodes inside a proved one is the child of its name.
        """
        if scope is None:
            return None
        if scope in self._module_of:
            return self._module_of[scope]
        above = self._module_of.get(scope[:-1]) if scope else None
        if above is None or scope in self._has_known:
            return None
        child = f"{above}.{scope[-1]}" if above else scope[-1]
        return child if child in self._modules else None

    @staticmethod
    def _has_all_nodes(scope: Scope, module: str, nodes: Iterable[tuple[Scope, str]]) -> bool:
        """Whether all nodes of a module and its descendants are in a scope."""
        return all(
            other[: len(scope)] == scope for other, owner in nodes if is_under(owner, module)
        )
