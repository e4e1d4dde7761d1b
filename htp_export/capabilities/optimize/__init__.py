"""Graph passes that keep the module tags: onnx_ir passes, one merge policy, and a pipeline."""
