"""Results and their tables: base of results, columns, tables by module, terminals and notebooks."""
