"""The toolkit that draws results for a terminal, a pipe or a notebook; it knows no capability."""
