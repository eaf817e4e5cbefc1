"""Converts the metadata keys of a file to the shape of a model: one module per part."""
