"""``extract`` and ``splice``: one module of a file as a model of its own, and a model in its place."""
