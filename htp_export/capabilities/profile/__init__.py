"""``profile``: latency and memory by module, whatever engine runs the model."""
