"""Models as Model Explorer draws them: graphs, overlays, its adapter, and its own application inside a page."""
