"""``extract`` and ``splice``: a module of a file as its own model, and a model in its place."""
