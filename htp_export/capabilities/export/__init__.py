"""The command ``export``: the files of a model by task, what other runtimes need beside them, and their checks."""
