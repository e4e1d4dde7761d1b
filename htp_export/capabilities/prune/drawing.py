"""The removed weights by module, drawn for a notebook."""

from htp_export.reporting.module_table import render_modules as drawn

__all__ = ["drawn"]
