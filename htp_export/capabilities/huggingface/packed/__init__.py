"""Quantized checkpoints: GPTQ, AWQ, bitsandbytes, GGUF."""
