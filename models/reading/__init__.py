"""Converts a GGUF's metadata keys to a model `Config`: one module per part."""
