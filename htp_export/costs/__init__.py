"""What a model costs, by module and by node: operations, bytes, memory, and the shapes that this follows from."""
