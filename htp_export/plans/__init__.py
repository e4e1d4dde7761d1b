"""Plans: ordered rules that assign values to modules and nodes, with one meaning everywhere."""
