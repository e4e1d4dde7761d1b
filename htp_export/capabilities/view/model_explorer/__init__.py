"""Model Explorer: its graphs and overlays, its adapter, and its own application inside a page."""
