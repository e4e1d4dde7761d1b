"""`cost` and `tree`: the commands that print what a model costs."""
