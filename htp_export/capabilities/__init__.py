"""One folder for each capability: its work, its result, how it is drawn, and its commands, ``NAME_command.py``.

A capability imports the folders outside of this one, and only the capabilities that
``tests/house/test_layout.py`` lists for it, inside of functions: each folder can be left out, and
the others still import.
"""
