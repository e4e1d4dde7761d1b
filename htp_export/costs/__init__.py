"""Cost of a model by module and node: operations, bytes, memory; and shapes of one run."""
