"""Plans as other tools read them: a file ``NAME.py`` for each tool, with a function ``plan_file``."""
