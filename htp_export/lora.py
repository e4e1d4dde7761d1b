"""Low-rank adapters: `insert` gives layers inputs for them, `adapter` converts one, and `fuse` adds one to the weights.

Examples:
    >>> import torch, htp_export
    >>> program = htp_export.export(torch.nn.Linear(4, 2).eval(), (torch.randn(2, 4),), verbose=False)
    >>> sorted(htp_export.lora.insert(program, ".").modules)
    ['']
"""

from htp_export.capabilities.lora.lora_files import adapter, fuse
from htp_export.capabilities.lora.lora_inputs import insert

__all__ = ["adapter", "fuse", "insert"]
