"""`tap`, `untap`, `steer`: tensors of modules as outputs of a file, and vectors added to them."""
