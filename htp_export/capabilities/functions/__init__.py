"""``functions`` and ``inline``: modules of a model as ONNX functions, and the flat graph again."""
