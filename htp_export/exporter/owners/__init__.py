"""From what was captured to each node's owners, and to each module's fate."""
