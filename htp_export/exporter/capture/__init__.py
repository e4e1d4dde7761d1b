"""The capture of an export: every call of a module, and the call of every operation."""
