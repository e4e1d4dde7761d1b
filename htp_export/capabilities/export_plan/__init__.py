"""Plans as files that other tools read: names of nodes and tensors, each with its precision."""
