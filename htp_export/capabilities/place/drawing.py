"""Where the modules of a model run, drawn for a notebook."""
