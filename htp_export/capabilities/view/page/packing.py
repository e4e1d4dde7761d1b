"""Compressed data of pages, which the script ``packed.js`` unpacks."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any


def packed(data: Any) -> str:
    """Data as compressed JSON in base64; equal for equal data."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()
