"""Plans for other tools: a file ``NAME.py`` for each tool, with a function ``plan_file``."""
