"""LoRA adapters: model inputs for them, their files, and fusion into the weights."""
