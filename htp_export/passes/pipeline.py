"""Runs passes until none finds anything any more, and keeps account of what each did to which module."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.passes.bookkeeping import Bookkeeping
from htp_export.passes.checking import OutputCheck
from htp_export.passes.registry import PassInfo
from htp_export.passes.results import Change, PassReport

__all__ = ["Pipeline"]

_log = logging.getLogger(__name__)

_MOST_ROUNDS = 12


@dataclass
class _Account:
    """What one pass did so far."""

    info: PassInfo
    seconds: float = 0.0
    changes: defaultdict[str, Change] = field(default_factory=lambda: defaultdict(Change))
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rolled_back: str = ""
    seen: int = -1  # the state of the model after it ran last


class Pipeline:
    """Passes, in order, again and again while any of them changes the model.

    Args:
        passes: The passes.
        check: Holds outputs against what they were; a pass that breaks its level is undone, named, and left out of
            further rounds.
    """

    def __init__(self, passes: Sequence[PassInfo], check: OutputCheck | None = None) -> None:
        self._accounts = [_Account(info) for info in passes]
        self._check = check

    def run(self, model: ir.Model) -> ir.Model:
        """Run the passes on a model, which is changed in place.

        Returns:
            The model; another one, if a pass made a new one or was undone.
        """
        books, state = Bookkeeping(model), 0
        for _ in range(_MOST_ROUNDS):
            started = state
            for account in self._accounts:
                if account.seen == state or account.rolled_back:
                    continue
                state += self._step(account, books)
                account.seen = state
            if state == started:
                break
        books.write()
        return books.model

    def _step(self, account: _Account, books: Bookkeeping) -> bool:
        """Run one pass once; whether it changed anything."""
        began = time.perf_counter()
        mark = books.mark() if self._check is not None else None
        result = account.info.make()(books.model)
        books.model = result.model
        changes, fused = books.settle() if result.modified else ({}, {})
        account.seconds += time.perf_counter() - began
        if not result.modified:
            return False
        if self._check is not None and mark is not None:
            fault = self._check.fault(books.model, account.info.level)
            if fault:
                _log.warning("pass %s was undone: %s", account.info.name, fault)
                account.rolled_back = fault
                books.restore(mark)
                return False
        for path, change in changes.items():
            account.changes[path] += change
        account.fused.update(fused)
        return True

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """What each pass did."""
        return tuple(
            PassReport(
                account.info.name,
                account.info.level,
                account.seconds,
                sum(account.changes.values(), Change()),
                dict(account.fused),
                account.rolled_back,
            )
            for account in self._accounts
        )

    @property
    def attribution(self) -> dict[str, dict[str, Change]]:
        """Pass → module path → what it did to nodes of the module itself."""
        return {account.info.name: dict(account.changes) for account in self._accounts}
