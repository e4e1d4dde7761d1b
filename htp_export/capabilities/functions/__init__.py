"""``functions`` and ``inline``: modules of a model as ONNX functions of it, and the way back."""
