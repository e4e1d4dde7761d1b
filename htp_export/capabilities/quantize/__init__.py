"""A precision for each module: plans, methods, calibration data, and files for other tools."""
