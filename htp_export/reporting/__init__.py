"""Results and their tables: the base of results, columns, tables by module, and layout for terminals and notebooks."""
