"""``info``: what a file is, and what can be done with it."""
