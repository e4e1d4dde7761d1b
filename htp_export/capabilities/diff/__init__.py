"""The differences between two files, module by module."""
