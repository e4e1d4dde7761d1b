"""``profile``: latency and memory by module, in any engine."""
