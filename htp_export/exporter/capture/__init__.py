"""What runs while PyTorch exports: every module's call, and every operation with the call that made it."""
