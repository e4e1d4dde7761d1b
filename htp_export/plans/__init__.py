"""Plans: ordered rules that give values to modules, and through them to nodes; one meaning for all capabilities."""
