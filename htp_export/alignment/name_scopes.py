"""Scopes in the names of nodes, ``/model/layers.0/attn/MatMul``, and the modules that they stand for.

A name proves nothing by itself. A scope stands for a module if the nodes in it whose owners are
known otherwise are those of the module: all of them, and no others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

from htp_export.format.tags import common_ancestor, is_under

Scope = tuple[str, ...]


def scope_of(*names: str) -> Scope | None:
    """The parts of the first name that is a path, without the last; None if there is none.

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
    """The modules for which scopes stand.

    ``known``: Scope and known owners of each node that has both. ``modules``: Paths of the modules
    that ran.

    Examples:
        >>> known = [(("h.0", "q"), ("layer.0.query",)), (("h.0", "k"), ("layer.0.key",)), (("h.1",), ("layer.1",))]
        >>> scopes = NameScopes(known, {"layer.0", "layer.0.query", "layer.0.key", "layer.1", "layer.0.act"})
        >>> scopes.module(("h.0",)), scopes.module(("h.0", "act")), scopes.module(("h.2",))
        ('layer.0', 'layer.0.act', None)
    """

    def __init__(
        self, known: Sequence[tuple[Scope, tuple[str, ...]]], modules: Container[str]
    ) -> None:
        self._modules = modules
        inside: defaultdict[Scope, list[str]] = defaultdict(list)
        nodes: list[tuple[Scope, str]] = []
        for scope, owners in known:
            owner = owners[0] if len(owners) == 1 else common_ancestor(owners)
            nodes.append((scope, owner))
            for length in range(len(scope) + 1):
                inside[scope[:length]].append(owner)
        direct: defaultdict[Scope, set[str]] = defaultdict(set)
        for scope, owner in nodes:
            direct[scope].add(owner)
        named = self._named(inside, direct)
        self._has_known = frozenset(inside)
        self._stands_for = {
            scope: module
            for scope, module in named
            if all(
                other[: len(scope)] == scope for other, owner in nodes if is_under(owner, module)
            )
        }

    def _named(
        self, inside: Mapping[Scope, Sequence[str]], direct: Mapping[Scope, set[str]]
    ) -> list[tuple[Scope, str]]:
        """The innermost module around the known owners in each scope, if these say that it is the whole scope."""
        found = []
        for scope, owners in inside.items():
            module, own = common_ancestor(owners), direct.get(scope, set())
            several = len(set(owners)) > 1 or owners[0] != module
            same_word = (
                bool(scope)
                and bool(module)
                and scope[-1].rpartition(".")[2] == module.rpartition(".")[2]
            )
            proved = own == {module} or (not own and bool(scope) and (several or same_word))
            if proved and module in self._modules:
                found.append((scope, module))
        return found

    def module(self, scope: Scope | None) -> str | None:
        """The module for which a whole scope stands; None if that is not known."""
        if scope is None:
            return None
        if scope in self._stands_for:
            return self._stands_for[scope]
        above = self._stands_for.get(scope[:-1]) if scope else None
        if above is None or scope in self._has_known:
            return None
        child = f"{above}.{scope[-1]}" if above else scope[-1]
        return child if child in self._modules else None
