"""``verify`` and ``compare``: a file against PyTorch, and against another file, module by module."""
