"""The command ``export``: the files of a model by task, further files for other runtimes, and checks."""
