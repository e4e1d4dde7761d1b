"""Graph passes that keep the module tags: each an onnx_ir pass, with one merge policy and one pipeline around them."""
