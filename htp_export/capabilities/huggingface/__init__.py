"""Models and example inputs by hub id, local folder or model type, and the folders that other runtimes expect."""
