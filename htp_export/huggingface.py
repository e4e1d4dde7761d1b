"""Models and example inputs from a hub id, a local folder or a bare model type of transformers.

Inputs are derived from the signature of ``forward`` and the config; there is no list of
architectures. transformers is imported when a function of this package is called.
"""

from htp_export.capabilities.huggingface.example_calls import ExampleCall
from htp_export.capabilities.huggingface.files_by_task import example_call, example_calls
from htp_export.capabilities.huggingface.inputs import dynamic_shapes, example_inputs
from htp_export.capabilities.huggingface.models import load_model
from htp_export.capabilities.huggingface.sources import Processor, load_processor
from htp_export.capabilities.huggingface.streaming import map_weights

__all__ = [
    "ExampleCall",
    "Processor",
    "dynamic_shapes",
    "example_call",
    "example_calls",
    "example_inputs",
    "load_model",
    "load_processor",
    "map_weights",
]
