"""The model between the steps: what its operators are, and which of its values depend on its inputs."""
