"""What results have in common: one base, columns, tables by module, and what is said of tags."""
