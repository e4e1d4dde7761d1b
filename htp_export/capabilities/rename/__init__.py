"""``rename``: nodes and tensors named after their modules."""
