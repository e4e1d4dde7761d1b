"""What was removed of each module of a model, drawn for a notebook."""
