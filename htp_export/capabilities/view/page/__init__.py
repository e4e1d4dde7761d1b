"""A model as one HTML file that loads nothing from elsewhere."""
