"""`htp-export` as a program that starts at once: forked from a process that has imported torch and all public names.

For tests of what runs the program: shells, hooks, pages. A test of how the program starts, what it imports, or which
variables of its environment Python reads (``PYTHONPATH``, ``PYTHONIOENCODING``) starts Python itself.
"""

import contextlib
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

_PROGRAM = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect({path!r})
    socket.send_fds(asking, [b"files"], [0, 1, 2])
    with asking.makefile("w") as file:
        json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], file)
    asking.shutdown(socket.SHUT_WR)
    status = asking.recv(1)
sys.exit(status[0] if status else 1)
"""


@contextlib.contextmanager
def on_path() -> Iterator[str]:
    """A ``PATH`` on which ``htp-export`` is the forked program, or the installed one where no process can fork."""
    usual = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    if not hasattr(os, "fork"):
        yield usual
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, client, program = (folder / file for file in ("socket", "client.py", "htp-export"))
        client.write_text(_PROGRAM.format(path=str(path)), encoding="utf-8")
        program.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {client} "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
        command = [sys.executable, "-m", "tests.forking", str(path)]
        root = Path(__file__).parents[1]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield f"{folder}{os.pathsep}{usual}"
            server.communicate()  # it ends with its input


def _serve(path: str) -> None:
    import onnxruntime  # noqa: F401 - commands run in it
    import torch.onnx  # noqa: F401

    import htp_export
    import htp_export.command.main
    from htp_export.capabilities.profile import latency  # noqa: F401

    for name in htp_export.__all__:
        getattr(htp_export, name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            asking, _ = listening.accept()
            if os.fork() == 0:
                os._exit(_answer(asking))
            asking.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(asking: socket.socket) -> int:
    _, files, _, _ = socket.recv_fds(asking, len(b"files"), 3)
    with asking.makefile("r", encoding="utf-8") as text:
        words, folder, environment = json.load(text)
    child = os.fork()
    if child == 0:
        os._exit(_run(files, words, folder, environment))
    asking.send(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255]))
    return 0


def _run(files: list[int], words: list[str], folder: str, environment: dict[str, str]) -> int:
    from htp_export.__main__ import run

    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["htp-export", *words]
    try:
        return run()
    except BaseException:  # an exit, too: `run` returns
        traceback.print_exc()
        return 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
