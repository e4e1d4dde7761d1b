"""Detectors of attention, convolution, recurrence, routing and time steps in a graph."""
