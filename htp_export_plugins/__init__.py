"""Engines and targets that our tests cannot run everywhere, each found by an entry point of ``pyproject.toml``.

Nothing in ``htp_export`` imports this package: a package of somebody else adds an engine in the
same way, by an entry point of the group ``htp_export.CAPABILITY``. The docstring of each module
says what it has to offer.
"""
