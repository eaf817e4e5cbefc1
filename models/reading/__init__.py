"""From the keys of a file to the shape of a model: one module for each part of it."""
