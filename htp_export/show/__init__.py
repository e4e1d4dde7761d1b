"""Drawing of results; nothing is computed here."""
