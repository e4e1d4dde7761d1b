"""ONNX files and the files of data beside them: read without their weights, written whole."""
