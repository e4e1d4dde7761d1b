"""Make a model smaller, module by module: plans are rules from selectors to values."""
