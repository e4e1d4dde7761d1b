"""``info``: a description of a file, and the commands that fit it."""
