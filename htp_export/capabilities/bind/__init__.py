"""`bind`: a new checkpoint in an exported file, also after optimisation or quantization, without an export"""
