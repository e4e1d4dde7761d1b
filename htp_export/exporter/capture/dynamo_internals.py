"""Private parts of Dynamo: graphs with breaks, where they end, and what Dynamo keeps; see ``torch_internals``."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from htp_export.process.restoring import Changes

_VALUES, _SIZES = "capture_scalar_outputs", "capture_dynamic_output_shape_ops"
_SYMBOLS_FOR_DATA: tuple[dict[str, Any], ...] = (
    {_VALUES: True, _SIZES: True},
    {_VALUES: False, _SIZES: True},
    {_VALUES: False, _SIZES: False},
)
"""Settings of Dynamo, in the order in which they are tried for a frame: symbols stand for values, and for sizes, that
depend on data, so that the graph goes on."""


class Broken(NamedTuple):
    """Where one of Dynamo's graphs ended before the function did.

    Attributes:
        reason: The first line of what Dynamo said.
        frames: File and line of each call on the way there, outermost first.
    """

    reason: str
    frames: tuple[tuple[str, int], ...]


def break_of(module: Any) -> Broken | None:
    """Where a graph that Dynamo made ended; None if it ends as the function does."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    return _broken(str(found.reason), [(str(frame.filename), int(frame.lineno or 0)) for frame in found.user_stack])


def _broken(said: str, frames: Sequence[tuple[str, int]]) -> Broken:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return Broken(lines[0] if lines else "graph break", tuple(frames))


def dynamo_frames(
    model: Any, backend: Callable[[Any, Any], Callable[..., Any]], lost: Callable[[Any, Broken], None]
) -> Callable[..., Any]:
    """Return a function that runs a model by Dynamo, frame by frame, with breaks.

    If Dynamo gives up a frame, it makes no graph of the frame at all. Symbols for values that depend on data can be the
    cause. For ``x[index, :2]`` with a tensor as index, torch 2.15 makes two of them and then does not find one of them
    in the result (``PendingUnbackedSymbolNotFound``). For ``range(n)`` in a loop, where ``n`` is such a symbol, the
    graph would break inside the loop, which Dynamo does not do. Such a frame is traced again with fewer symbols: the
    graph then breaks where a value is needed, before the loop, and the graphs before and after the break are kept.

    Args:
        model: The module.
        backend: Given each graph module and its example inputs; returns what runs in its place.
        lost: Given a frame that runs and is in no graph, and why.
    """
    import torch._dynamo

    context: Any = torch._dynamo.optimize(backend)  # type: ignore[no-untyped-call,unused-ignore]
    converter = context.callback._torchdynamo_orig_backend
    converter._inner_convert = _TriedAgain(converter._inner_convert, lost)
    run: Callable[..., Any] = context(model)
    return run


class _TriedAgain:
    """Dynamo's tracer of a frame; where it gives up, it runs again with fewer symbols for data."""

    def __init__(self, convert: Callable[..., Any], lost: Callable[[Any, Broken], None]) -> None:
        self._convert, self._lost = convert, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config

        errors: list[Exception] = []
        for symbols in _SYMBOLS_FOR_DATA:
            try:
                with config.patch(**symbols):
                    return self._convert(frame, *args, **kwargs)
            except Exception as error:  # Dynamo catches it, and runs the frame as it is
                errors.append(error)
        # The last one is of a trace without symbols: it names the line that needs the value of a tensor.
        stack = [(str(each.filename), int(each.lineno or 0)) for each in getattr(errors[-1], "real_stack", None) or ()]
        code = frame.f_code
        self._lost(frame, _broken(str(errors[-1]), stack or [(code.co_filename, code.co_firstlineno)]))
        raise errors[-1]


def is_forward_of_layer(code: Any) -> bool:
    """Whether code is the ``forward`` of one of torch's own layers."""
    import torch.nn.modules

    folder = str(torch.nn.modules.__file__).rpartition("__init__")[0]
    return isinstance(code, types.CodeType) and code.co_name == "forward" and code.co_filename.startswith(folder)


def settings_for_breaks() -> Any:
    """Settings of Dynamo for graphs that are as large and as many as can be, in a ``with`` block."""
    import torch._dynamo.config as config

    wanted: dict[str, Any] = {
        "suppress_errors": True,
        "recompile_limit": 10_000,
        "accumulated_recompile_limit": 10_000,
    }
    return config.patch(**wanted)


def leave_dynamo_as_it_was(changes: Changes) -> None:
    """Put back what Dynamo keeps of the code that it has seen, and of that alone, when the changes are taken back."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo import convert_frame, pgo, utils

    trackers = (convert_frame.input_codes, convert_frame.output_codes)
    seen = [set(tracker.seen_ids) for tracker in trackers]
    entries = {id(entry.code) for code in _codes(trackers[0]) for entry in eval_frame._debug_get_cache_entry_list(code)}
    counted = {name: counter.copy() for name, counter in utils.counters.items()}
    profile = {name: getattr(pgo, name) for name in ("_CODE_STATE", "_INIT_CODE_STATE") if hasattr(pgo, name)}

    def put_back() -> None:
        for code in _codes(trackers[0]):
            if id(code) not in seen[0]:
                eval_frame.reset_code(code)
                continue
            for entry in eval_frame._debug_get_cache_entry_list(code):
                if id(entry.code) not in entries:
                    _forget(entry)
        for tracker, before in zip(trackers, seen, strict=True):
            tracker.seen[:] = [each for each in tracker.seen if id(each()) in before]
            tracker.seen_ids &= before
        utils.counters.clear()
        utils.counters.update(counted)
        for name, value in profile.items():
            setattr(pgo, name, value)

    changes.will_undo(put_back)
    for name in profile:
        setattr(pgo, name, None)


def _codes(tracker: Any) -> list[types.CodeType]:
    return [code for each in tracker.seen if (code := each()) is not None]


def _forget(entry: Any) -> None:
    """Remove what Dynamo compiled of code from its cache."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    state = entry.guard_manager.extra_state
    if state is not None:
        state.invalidate(entry, DeletedGuardManagerWrapper("made for inspection"))


def modules_in_scopes(node: Any) -> list[int]:
    """The ``id`` of each module in which a node of a graph runs that Dynamo made, outermost first, as far as known.

    ``torch.export`` puts a name before it if it exports such a graph.
    """
    keys = node.meta.get("nn_module_stack") or {}
    found = (re.search(r"(\d+)(@\d+)?$", key) for key in keys)
    return [int(match.group(1)) for match in found if match]
