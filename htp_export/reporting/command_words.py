"""Messages of the library with commands in place of, or beside, Python; and the note on tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from htp_export.reporting.tag_facts import TagFacts, tag_lines

if TYPE_CHECKING:
    from rich.text import Text

_COMMANDS = {
    "htp_export.tagging(strict=False), or --allow-untagged on the command line": "--allow-untagged",
    "htp_export.export(...) in place of torch.onnx.export(...)": "htp-export export",
    "htp_export.export(...)": "htp-export export",
    "htp_export.bind(...)": "htp-export bind",
    "htp_export.carry(before, after)": "htp-export carry BEFORE AFTER -o OUT",
    "htp_export.carry(model, file)": "htp-export carry MODEL FILE -o OUT",
    "carry(before, after, ...)": "htp-export carry BEFORE AFTER",
    "carry(before, after)": "htp-export carry BEFORE AFTER",
    "htp_export.embed_map(before)": "--embed-map of export and run",
    "lora.insert gives its linear layers": "htp-export lora insert gives its linear layers",
    "or use lora.insert": "or use htp-export lora insert",
    "data={name: array}, or an .npz file": "--set data=FILE.npz",
    "takes one run, but data have several; give one mapping of input name → array": "takes one run, but --data has "
    "several; give one .npz file, or a factory that returns one run",
    "give dims (": "give --dims (",
    ") or data": ") or --data",
    "give shapes or data": "give --shapes or --data",
    "shapes are for random inputs; give either shapes or data": (
        "--shapes is for random inputs; give either --shapes or --data"
    ),
    "try dynamo=False": "try --torchscript",
    "try dynamo=True": "try --dynamo",
    "view(..., explorer=True)": "--explorer",
    "the objective 'metric' and the function metric go together": "--objectives metric and --metric go together",
    "but dims has": "but --dims has",
}
"""Python → command; of two that begin alike, the longer one first."""

_PYTHON = re.compile("|".join(map(re.escape, _COMMANDS)))


def in_commands(text: str) -> str:
    """A message with commands in place of Python.

    Examples:
        >>> in_commands("htp_export.carry(before, after) brings them back")
        'htp-export carry BEFORE AFTER -o OUT brings them back'
    """
    return _PYTHON.sub(lambda match: _COMMANDS[match[0]], text)


def in_both(text: str) -> str:
    """A message with commands beside Python, for pages, which are for readers of both.

    Examples:
        >>> in_both("Export it with htp_export.export(...) in place of torch.onnx.export(...).")
        'Export it with htp-export export, or in Python with htp_export.export(...) in place of torch.onnx.export(...).'
        >>> in_both("htp_export.carry(before, after) brings them back.")
        'htp-export carry BEFORE AFTER -o OUT (in Python: htp_export.carry(before, after)) brings them back.'
    """

    def both(match: re.Match[str]) -> str:
        command = _COMMANDS[match[0]]
        python = match[0]
        if text[: match.start()].endswith(" with "):
            return f"{command}, or in Python with {python}"
        return f"{command} (in Python: {python})"

    return _PYTHON.sub(both, text)


def tag_note(*facts: TagFacts | None) -> list[Text]:
    """The lines of `tag_lines` with commands in place of Python, yellow if the tags need action."""
    from rich.text import Text

    needs_action = any(fact is not None and (fact.advice or fact.untagged) for fact in facts)
    style = "yellow" if needs_action else "dim"
    return [Text(in_commands(line), style=style) for line in tag_lines(*facts)]
