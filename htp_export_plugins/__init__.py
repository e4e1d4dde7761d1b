"""Engines and targets that need other programs, registered by entry points of ``pyproject.toml``.

``htp_export`` never imports this package. Any other package can add an engine in the same way, by
an entry point of the group ``htp_export.CAPABILITY``. The docstring of each module describes its
interface.
"""
