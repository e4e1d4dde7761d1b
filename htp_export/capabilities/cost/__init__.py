"""`cost` and `tree`: commands that print the cost of a model."""
