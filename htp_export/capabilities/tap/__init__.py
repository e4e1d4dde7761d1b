"""`tap`, `untap` and `steer`: any tensor of a module as an output of the file, and vectors added to such tensors."""
