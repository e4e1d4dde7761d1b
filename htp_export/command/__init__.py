"""The command line: its program, options of several commands, progress and messages."""
