"""Module tags for the results of other tools: which original nodes each node replaces."""
