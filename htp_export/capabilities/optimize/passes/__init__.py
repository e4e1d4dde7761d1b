"""The passes: one file each, found by its name."""
