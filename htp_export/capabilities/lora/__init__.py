"""Low-rank adapters: inputs for them, their files, and adapters added to the weights."""
