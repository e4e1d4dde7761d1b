"""The rules of operators, a file for each family; see https://onnx.ai/onnx/operators/.

A rule gives one shape for each output, or None where it cannot tell; a dimension that it cannot tell is None.
"""
