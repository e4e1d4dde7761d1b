"""Models and example inputs from a hub id, a local folder or a bare model type of transformers.

What a model takes is read from its ``forward`` signature and its config; there is no list of architectures.
transformers is imported when a function here runs, not before.
"""

from htp_export.huggingface.inputs import dynamic_shapes, example_inputs
from htp_export.huggingface.models import load_model

__all__ = ["dynamic_shapes", "example_inputs", "load_model"]
