"""A precision for each module: types, calibration data, engines, and what they made put in its place."""
