"""Temporary changes of the process, garbage collection, and progress of long loops."""
