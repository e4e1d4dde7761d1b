"""Methods of ONNX Runtime, and of ONNX itself: a file each, with a class ``METHOD``."""
