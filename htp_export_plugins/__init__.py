"""Engines and targets that need what our tests cannot run everywhere, each found by an entry point of ``pyproject.toml``.

Nothing in ``htp_export`` imports this package: a package of somebody else adds an engine in the same way, by an entry point
of the group ``htp_export.CAPABILITY``. Each module says in its docstring what it has to offer.
"""
