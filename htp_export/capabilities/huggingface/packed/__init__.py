"""Checkpoints whose weights are quantized already: GPTQ, AWQ, bitsandbytes, GGUF."""
