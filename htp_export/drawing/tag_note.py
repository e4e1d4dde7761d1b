"""What a file knows about its tags, drawn under a table."""

from __future__ import annotations

from rich.text import Text

from htp_export.drawing.command_words import in_commands
from htp_export.results.tag_facts import TagFacts, tag_lines


def tag_note(*facts: TagFacts | None) -> list[Text]:
    """The lines of ``tag_lines``, in yellow where something is to be done about the tags, and said as commands."""
    missing = any(fact is not None and (fact.advice or fact.untagged) for fact in facts)
    return [Text(in_commands(line), style="yellow" if missing else "dim") for line in tag_lines(*facts)]
