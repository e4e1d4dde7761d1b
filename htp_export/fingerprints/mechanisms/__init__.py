"""Mechanisms of neural networks as they show in a graph: attention, convolution, recurrence, routing, time steps."""
