"""What a tool made of a tagged model: which of its nodes do which of the old nodes' work."""
