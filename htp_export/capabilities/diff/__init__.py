"""What differs between two files, module by module."""
