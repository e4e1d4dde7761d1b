"""``carry`` and ``adopt``: module tags for what other tools made, and adapters that run these tools."""
