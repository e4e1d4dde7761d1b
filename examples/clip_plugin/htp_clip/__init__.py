"""`clip`: the outputs of modules of an ONNX file, limited to a range."""

from htp_clip.clipping import Clipped, clip

__all__ = ["Clipped", "clip"]
