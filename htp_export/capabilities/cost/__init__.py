"""What a model costs, by module and by node, and the shapes that this follows from."""
