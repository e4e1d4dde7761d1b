"""Give layers inputs for LoRA adapters, convert and fuse them."""
