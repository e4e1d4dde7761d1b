"""Operations that write models, each killed before every one of its changes to the file system, or at random moments.

``python -m tests.killed NAME FOLDER`` prints what was found after each kill, as a line of JSON. The process imports
what it needs once, and runs the operation in forks of itself; an audit hook counts what a fork does to the folder, and
kills it at a chosen point. ``python -m tests.killed NAME FOLDER KILLS SEED`` kills forks from outside instead, each at
a moment of its run that the seed chooses: in the middle of a write, too.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import htp_export
from htp_export.errors import FileError
from htp_export.files.lazy_tensor import slots
from htp_export.files.model_files import read_model

CHANGES = {
    "os.rename",
    "os.link",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.chown",
    "os.truncate",
}
FINISHED = 77

# Each writes ``out.onnx`` (or ``stages``) in a folder where there is one, made of ``old.onnx``; ``in.onnx`` has other
# weights. Both are exports of one net, which `tests.everywhere.test_killed` makes.
OPERATIONS: dict[str, Callable[[Path], Any]] = {
    "save": lambda at: htp_export.load(at / "in.onnx").save(at / "out.onnx"),
    "save_named": lambda at: htp_export.load(at / "in.onnx").save(at / "out.onnx", "out.onnx.data"),
    "save_shared": lambda at: htp_export.load(at / "in.onnx").save(
        at / "out.onnx", share_weights=True
    ),
    "optimize": lambda at: htp_export.optimize(at / "in.onnx", at / "out.onnx"),
    "carry": lambda at: htp_export.carry(at / "in.onnx", at / "in.onnx", at / "out.onnx"),
    "embed_map": lambda at: htp_export.embed_map(at / "in.onnx", at / "out.onnx"),
    "extract": lambda at: htp_export.extract(at / "in.onnx", "0", at / "out.onnx"),
    "splice": lambda at: htp_export.splice(
        at / "old.onnx", "0", at / "piece.onnx", at / "out.onnx"
    ),
    "functions": lambda at: htp_export.functions(
        at / "in.onnx", "class:Sequential", at / "out.onnx"
    ),
    "inline": lambda at: htp_export.inline(at / "in.onnx", at / "out.onnx"),
    "rename": lambda at: htp_export.rename(at / "in.onnx", at / "out.onnx"),
    "tool": lambda at: htp_export.tools.onnxscript(at / "in.onnx", at / "out.onnx"),
    "bind_data": lambda at: None,  # see `_binding`
    "bind_shared": lambda at: htp_export.bind(
        at / "old.onnx", at / "tuned" / "model.safetensors", at / "out.onnx", share_weights=True
    ),
    "partition": lambda at: htp_export.partition(at / "in.onnx", 2, at / "stages"),
    "export": lambda at: None,  # see `_program`
}


def _program() -> Callable[[Path], Any]:
    """The last step of an export, which torch takes itself."""
    import torch

    from tests.everywhere.test_killed import net

    program = htp_export.export(net(1), (torch.zeros(2, 64),), verbose=False)
    assert program is not None
    return lambda at: program.save(str(at / "out.onnx"), external_data=True)


def _import_bind(weights: dict[str, Any]) -> None:
    import torch

    from tests.everywhere.test_killed import net

    program = htp_export.export(net(0), (torch.zeros(2, 64),), verbose=False)
    htp_export.bind(program, weights)


def _binding() -> Callable[[Path], Any]:
    """New weights in the data file alone; the forks do not import what it needs."""
    from tests.everywhere.test_killed import net

    weights = net(1).state_dict()
    _import_bind(weights)
    return lambda at: htp_export.bind(at / "out.onnx", weights, in_place_data=True)


def state(folder: Path) -> str:
    """What can be read of the outputs: a digest of all weights; ``refused`` if htp_export refuses them."""
    files = sorted(folder.glob("stages/*.onnx")) or [folder / "out.onnx"]
    digest = hashlib.sha256()
    if not files[0].is_file():
        return "missing"
    try:
        for file in files:
            model = read_model(file)
            tensors = [(slot.tensor.name or "", slot.tensor.tobytes()) for slot in slots(model)]
            digest.update(repr(sorted(tensors)).encode())
            digest.update(str(sorted(node.op_type for node in model.graph)).encode())
    except FileError:
        return "refused"
    return digest.hexdigest()[:12]


def names(folder: Path) -> list[str]:
    """Every file there, without serials."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"\.[0-9a-f]{8}\.data$", ".data", name) for name in found)


def run(
    operation: Callable[[Path], Any], folder: Path, stop: int = -1, seconds: float | None = None
) -> tuple[int, int]:
    """Run an operation in a fork that is killed before its change number ``stop``, or after some seconds.

    Returns:
        How the fork ended, and how many changes it began.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            opened = (
                event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if event in CHANGES or (opened and str(args[0]).startswith(str(folder))):
                if seen == stop:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(watch)
        try:
            operation(folder)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os.write(writing, str(seen).encode())
        os._exit(FINISHED)
    os.close(writing)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)  # it is there until it is waited for
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        count = pipe.read()
    return os.waitstatus_to_exitcode(status), int(count or -1)


def main(name: str, home: Path, kills: int = 0, seed: int = 0) -> None:
    prepared = {"export": _program, "bind_data": _binding}
    operation = prepared[name]() if name in prepared else OPERATIONS[name]
    given = home / "given"
    fresh = home / "fresh"

    def again() -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(given, fresh)

    again()
    before = state(fresh)
    began = time.perf_counter()
    status, changes = run(operation, fresh)
    spent = time.perf_counter() - began
    assert status == FINISHED, name
    after, listing = state(fresh), names(fresh)
    moment = random.Random(seed)
    states: dict[str, int] = {}
    killed = 0
    for stop in range(kills or changes):
        end: dict[str, Any] = {"seconds": moment.random() * spent} if kills else {"stop": stop}
        again()
        status, _ = run(operation, fresh, **end)
        assert status == -signal.SIGKILL or (kills and status == FINISHED), (name, end, status)
        killed += status == -signal.SIGKILL
        found = state(fresh)
        said = {before: "old", after: "new", "refused": found, "missing": found}.get(found, "wrong")
        states[said] = states.get(said, 0) + 1
        began = time.perf_counter()
        status, _ = run(operation, fresh)
        spent = time.perf_counter() - began  # the machine may be busier or less so than before
        assert status == FINISHED, (name, end, status)
        assert state(fresh) == after, (name, end)
        assert names(fresh) == listing, (name, end, names(fresh), listing)
    print(
        json.dumps(
            {"changes": changes, "killed": killed, "states": states, "same": before == after}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
