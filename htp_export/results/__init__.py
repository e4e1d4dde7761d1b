"""What results have in common: columns, tables by module, and what is said of tags."""
