"""Run commands and functions under an audit hook: ``python -m tests.audited PLAN.json``, see `main`.

It prints, as JSON, the events in which something that a file names was imported, opened, loaded or run.
"""

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import htp_export
from htp_export.command.main import main as run_command
from tests.all_commands import arguments

NAMES = ("evilmod", "outside_secret")
"""Every hostile value has one of these: a module in the current folder, and a folder beside it."""
_ALWAYS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "socket.getaddrinfo",
)
_WATCHED = {
    "open",
    "import",
    "exec",
    "ctypes",
    "pickle",
    "os",
    "shutil",
    "glob",
    "subprocess",
    "socket",
}


def functions_of(file: str) -> dict[str, Any]:
    """What reads metadata and has no command of its own."""
    tagged = htp_export.load(file)
    return {
        "properties": lambda: (
            tagged.signatures,
            tagged.parameters,
            tagged.calls,
            tagged.tag_facts,
            str(tagged),
        ),
        "regions": lambda: [(tagged[path].inputs, tagged[path].outputs) for path in tagged],
        "nodes": lambda: htp_export.nodes(tagged).to_dict(),
        "contamination": lambda: htp_export.contamination(tagged),
        "embed_map": lambda: htp_export.embed_map(file),
        "carry": lambda: htp_export.carry(None, file),
        "pipeline": lambda: htp_export.pipeline(file, file, "again.onnx"),
        "html": lambda: tagged._repr_html_(),
        "save": lambda: tagged.save("saved.onnx"),
    }


def main() -> None:
    """Run the commands of the plan, which are listed for each file.

    The plan has ``commands`` and ``others``: the files that stand for other words of commands.
    """
    plan, seen, doing = (
        json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")),
        set[str](),
        ["starting"],
    )
    logging.disable()
    warnings.simplefilter("ignore")

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event.partition(".")[0] not in _WATCHED:
            return
        said = repr(values[0].co_filename if event == "exec" else values)
        if event in _ALWAYS or any(name in said for name in NAMES):
            seen.add(f"{doing[0]}: {event} {said}"[:300])

    sys.addaudithook(hook)
    for file, commands in plan["commands"].items():
        for command in commands:
            doing[0] = f"{Path(file).name} {command}"
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                status = run_command(arguments(command, {"FILE": file, **plan["others"]}))
            if status == 3:
                seen.add(f"{doing[0]}: status 3")
        try:
            functions = functions_of(file)
        except htp_export.HtpExportError:
            continue
        for name, function in functions.items():
            doing[0] = f"{Path(file).name} {name}()"
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    function()
                except htp_export.HtpExportError:
                    continue
                except Exception as error:
                    seen.add(f"{doing[0]}: {error!r}")
    doing[0] = "ending"
    print(json.dumps(sorted(seen)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
