"""Forks of a process while another of its threads works: ``python -m tests.forks FOLDER NAME...``.

It prints, as JSON, for each name how the child process ended, what it found changed, and whether the thread finished
its own work.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

import htp_export
from htp_export.capabilities.optimize import onnxscript_rules
from htp_export.exporter import capture_session
from htp_export.files import filesystem
from htp_export.files.model_files import write_model
from htp_export.process.quiet import quiet
from tests.exporter.test_interrupts import changed_since, state

SECONDS = 60
"""For the child, which takes two where nobody waits."""

_is_inside, _goes_on = threading.Event(), threading.Event()


def _pause() -> None:
    """Stop the thread in the middle of its work; others, and a child process, which has this thread alone, go on."""
    if threading.current_thread() is not threading.main_thread():
        _is_inside.set()
        _goes_on.wait(SECONDS)


class Net(nn.Module):
    """Pauses in its ``forward``, if it should."""

    pauses = False

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pauses:
            _pause()
        y: torch.Tensor = self.attention(x, x, x)[0]
        return self.fc(y) * 2


NET, X = Net().eval(), torch.zeros(1, 3, 4)


def export(folder: Path, *, dynamo: bool = True) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        htp_export.export(NET, (X,), folder / f"{os.getpid()}.onnx", dynamo=dynamo, verbose=False)


def tag(folder: Path) -> None:
    """Pause after torch's part of an export, when the nodes get their tags."""
    write_tags = capture_session.write_tags

    def paused(*given: Any) -> Any:
        _pause()
        return write_tags(*given)

    capture_session.write_tags = paused
    try:
        export(folder)
    finally:
        capture_session.write_tags = write_tags


def write(folder: Path) -> None:
    weight = ir.LazyTensor(lambda: (_pause(), ir.tensor(np.ones((64, 64), np.float32)))[1],
                           ir.DataType.FLOAT, ir.Shape((64, 64)), name="w")  # fmt: skip
    value = ir.Value(
        name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=weight.shape, const_value=weight
    )
    node = ir.node("Identity", [value], outputs=[ir.val("y", ir.DataType.FLOAT, [64, 64])])
    graph = ir.Graph(
        [], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 20}, name="g"
    )
    write_model(
        ir.Model(graph, ir_version=10), folder / f"{os.getpid()}.onnx", "w.data" + str(os.getpid())
    )


def hold_quiet(folder: Path) -> None:
    with quiet("torch"):
        _pause()


def hold_matching(folder: Path) -> None:
    with onnxscript_rules.changed_rules():
        _pause()


def evaluate(folder: Path) -> None:
    from htp_export.capabilities.verify.pytorch_run import evaluating

    with evaluating(NET):
        _pause()


class Cached:
    """Has a property that is computed while the process forks."""

    __module__ = htp_export.__name__

    @functools.cached_property
    def value(self) -> int:
        _pause()
        return 1


def compute(folder: Path) -> None:
    htp_export.Cached = Cached  # type: ignore[attr-defined] # a class of the package, as those with such properties
    assert Cached().value == 1


WORK: dict[str, Callable[[Path], None]] = {
    "tag": tag,
    "export": export,
    "torchscript": functools.partial(export, dynamo=False),
    "write": write,
    "quiet": hold_quiet,
    "fuse": hold_matching,
    "evaluate": evaluate,
    "cached": compute,
}
"""What the thread does; the child does the same, and writes."""

FOLDER = "folder"
OF_TORCH = ("export", "torchscript")
"""In the middle of a trace, torch's own state is that of a trace: exports in the child end with an error of torch."""


def forked(name: str, folder: Path) -> dict[str, Any]:
    """Fork while a thread is in the middle of some work."""
    do = WORK[name]
    _is_inside.clear()
    _goes_on.clear()
    do(folder)  # imports
    write(folder)
    before, shown = state(NET), sys.stdout
    Net.pauses = name in OF_TORCH
    (folder / "child.json").unlink(missing_ok=True)
    failed: list[BaseException] = []

    def in_thread() -> None:
        try:
            do(folder)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    assert _is_inside.wait(SECONDS)
    child = os.fork()
    if child == 0:
        try:
            changed = [*changed_since(before, NET), *["stdout"] * (sys.stdout is not shown)]
            before = state(NET)
            for each in (do, write):
                with contextlib.suppress(*[RuntimeError, AssertionError] * (name in OF_TORCH)):
                    each(folder)
            changed += [f"afterwards: {each}" for each in changed_since(before, NET)]
            (folder / "child.json").write_text(json.dumps(changed))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ended = _waited_for(child)
    _goes_on.set()
    thread.join(SECONDS)
    changed = json.loads((folder / "child.json").read_text()) if ended == 0 else []
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    said = {"child": ended, "changed": changed, "thread": list(map(repr, failed)), "left": left}
    return {**said, "after": changed_since(before, NET)}


def _waited_for(child: int) -> int | str:
    """The exit status of a child process; "hangs" if it does not end."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


def with_lock_of_folder(folder: Path) -> dict[str, Any]:
    """Fork in the middle of a commit, and find out whether a child that lives on keeps the lock of the folder."""
    with filesystem.one_at_a_time(folder):
        child = os.fork()
        if child == 0:
            time.sleep(SECONDS)
            os._exit(0)
    taken = threading.Event()

    def take() -> None:
        with filesystem.one_at_a_time(folder):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    is_free = taken.wait(10)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return {"free": is_free}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)  # the threads of OpenMP do not exist in a child, and it waits for them
    found = {}
    for name in names:
        found[name] = with_lock_of_folder(folder) if name == FOLDER else forked(name, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
